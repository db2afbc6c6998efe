"""`InputGrammar`: what the text of a custom tool's call must be. Most notations write it within
JSON, so `Escapes` makes its expressions those of the escaped text, and the rules stay. Invariant: a
text is of the client's grammar exactly if its escaped form is of the one that is made here; what
cannot be rewritten is refused by name."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cadenza.errors import InvalidRequestError
from cadenza.text.schemas.grammar import GrammarCheck, joined_grammar, lark_grammar, parts_of
from cadenza.text.schemas.json_schema import NO_TEXT

_IN_CLASS = str.maketrans({'"': r"\x22", "\\": r"\x5C"})
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{(\w+)\})")
_PROPERTY = re.compile(r"\\([pP])(?:\{\^?(\w+)\}|(\w))")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|[iu]*(?:-[iu]+)?[:)])")
_CLASS_SYNTAX = re.compile(r"(?:\\.|[^\\])*?(?:\[|&&|--|~~)", re.DOTALL)
_TO_ESCAPE = re.compile(r"\\([/\x22])|([/\x22\x00-\x1F])|(\\.)", re.DOTALL)
_BAR = re.compile(r"(\\.)|\|", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Escapes:
    """Which characters of a text have escapes: those that JSON asks for, and `also`."""

    also: str = ""

    @property
    def characters(self) -> str:
        return '"\\' + "".join(map(chr, range(0x20))) + self.also

    @property
    def any_text(self) -> str:
        return self._matched(self._plain, self.characters) + "*"

    @property
    def _plain(self) -> str:
        also = "".join(rf"\x{ord(each):02X}" for each in self.also)
        return rf"[^\x22\x5C\x00-\x1F{also}]"

    def regex(self, pattern: str, *, dot_is_any: bool = False) -> str:
        """Slashes are escaped; `dot_is_any`: a dot matches the end of a line, too. Raises
        InvalidRequestError."""
        if pattern.startswith("(?s)"):
            pattern, dot_is_any = pattern[4:], True
        pattern = pattern.removeprefix("^")
        if pattern.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", pattern):
            pattern = pattern[:-1]
        return "".join(self._pieces(pattern, dot_is_any=dot_is_any))

    def text(self, text: str) -> str:
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        for each in self.also:
            escaped = escaped.replace(each, rf"\u{ord(each):04x}")
        return escaped

    def _pieces(self, pattern: str, *, dot_is_any: bool) -> Iterator[str]:
        position = 0
        while position < len(pattern):
            character = pattern[position]
            if character == "\\":
                piece, position = self._escape(pattern, position)
                yield piece
                continue
            if character == "[":
                end = _class_end(pattern, position)
                yield self._class(pattern[position:end])
                position = end
                continue
            if pattern.startswith("(?", position):
                group = _GROUP.match(pattern, position)
                if group is None:
                    raise _not_escaped(f"the group {pattern[position : position + 4]}")
                yield group[0]
                position = group.end()
                continue
            if character in "^$":
                raise _not_escaped(f"{character} within an expression")
            if character == ".":
                yield self._matched(
                    self._plain,
                    self.characters if dot_is_any else self.characters.replace("\n", ""),
                )
            elif character in "()|*+?{}":
                yield character
            else:
                yield self._literal(character)
            position += 1

    def _escape(self, pattern: str, position: int) -> tuple[str, int]:
        code = _CODE.match(pattern, position)
        if code is not None:
            return self._literal(_character(code)), code.end()
        named = _PROPERTY.match(pattern, position)
        if named is not None:
            return self._class(f"[{named[0]}]"), named.end()
        letter = pattern[position + 1 : position + 2]
        if letter and letter in "dDwWsS":
            return self._class(rf"[\{letter}]"), position + 2
        if letter in _CONTROLS and letter:
            return self._literal(_CONTROLS[letter]), position + 2
        if not letter or letter.isalnum() or letter in "<>":
            raise _not_escaped(rf"\{letter}")
        return self._literal(letter), position + 2

    def _literal(self, character: str) -> str:
        if character in self.characters:
            return f"(?-i:{self._spelled(character)})"
        return re.escape(character).replace("/", r"\/")

    def _spelled(self, character: str) -> str:
        return r"\x5C" + re.escape(self.text(character)[1:]).replace('"', r"\x22")

    def _class(self, written: str) -> str:
        body = written[1:-1]
        if _CLASS_SYNTAX.match(body):
            raise _not_escaped(f"the class {written}, which has classes or operators within it")
        taken = "".join(each for each in self.characters if _is_in(body, each))
        inner = _TO_ESCAPE.sub(lambda m: m[3] or rf"\x{ord(m[1] or m[2]):02X}", body)
        return self._matched(f"[[{inner}]&&{self._plain}]", taken)

    def _matched(self, plain: str, escaped: str) -> str:
        spelled = [self.text(each)[1:] for each in escaped]
        short = "".join(each for each in spelled if len(each) == 1)
        codes = "|".join(each[-2:] for each in spelled if len(each) > 1)
        options = [plain]
        if short:
            options.append(rf"(?-i:\x5C[{short.translate(_IN_CLASS)}])")
        if codes:
            options.append(rf"(?-i:\x5Cu00(?:{codes}))")
        return f"(?:{'|'.join(options)})"


def _character(code: "re.Match[str]") -> str:
    try:
        return chr(int(next(filter(None, code.groups())), 16))
    except (ValueError, OverflowError):
        raise _not_escaped(code[0]) from None


def _class_end(pattern: str, position: int) -> int:
    at = position + 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _is_in(body: str, character: str) -> bool:
    is_negated = body.startswith("^")
    rest = body.removeprefix("^")
    properties = [*_PROPERTY.finditer(rest)]
    plain = _CODE.sub(lambda code: rf"\U{ord(_character(code)):08x}", _PROPERTY.sub("", rest))
    plain = _BAR.sub(lambda m: m[1] or r"\|", plain)
    try:
        found = bool(plain) and re.match(f"[{plain}]", character, re.ASCII) is not None
    except re.error:
        raise _not_escaped(f"the class [{body}]") from None
    return is_negated != (found or any(_has(each, character) for each in properties))


def _has(named: "re.Match[str]", character: str) -> bool:
    name = named[2] or named[3]
    if not re.fullmatch(r"[CLMNPSZ][a-z]?", name) or "^" in named[0]:
        raise _not_escaped(named[0])
    return unicodedata.category(character).startswith(name) == (named[1] == "p")


def _not_escaped(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"its expressions use {what}, which cannot be followed within a call; write it otherwise",
        param="tools",
    )


MAX_HEAD_PIECES = 64  # of a definition's name and what is said of it

_TOKEN = re.compile(
    r"""(?P<dropped>//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<many>~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<directive>%\s*[a-zA-Z_]*)
    |(?P<special><[^>\n]*>)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_IMPORT = re.compile(r"%\s*import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([^)]*)\))")
_HEAD_REST = re.compile(r"(\s*\.\d+|\s*\[[^\]\n]*\]|::\w+)*[ \t]*:(?!:)")
_HEAD_BEFORE = re.compile(r"(^|\n)[ \t]*[?!]{0,2}$")
_RANGE = re.compile(r"\s*\.\.\s*")
_COMMON = {  # terminals of Lark's library that may have characters with escapes
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
    "C_COMMENT": r"/\/\*([^*]|\*+[^*\/])*\*+\//",
}

_ARGUMENTS = r"""start: "{" BLANKS? "\"input\"" BLANKS? ":" BLANKS? @input BLANKS? "}"
BLANKS: /[ \t]|\n[ \t]{0,16}/"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrammar:
    """The grammar of a text, in Lark's notation, or an expression that all of it matches."""

    syntax: Literal["lark", "regex"]
    definition: str

    @property
    def lark(self) -> str:
        if self.syntax == "lark":
            return self.definition
        escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], self.definition)
        return "start: TEXT\nTEXT: /" + escaped.replace("\n", r"\n") + "/"

    def written(self, check: GrammarCheck, escapes: Escapes) -> str:
        """The grammar of the text as a JSON text. Raises InvalidRequestError."""
        problem = check(lark_grammar(self.lark))
        if problem is not None:
            raise InvalidRequestError(problem, param="tools")
        digest = hashlib.sha256(self.definition.encode()).hexdigest()[:16]
        escaped = escaped_lark(self.lark, check, escapes)
        parts = [{"name": f"text_{digest}", "lark_grammar": escaped}]
        return joined_grammar(rf'start: "\"" @text_{digest} "\""', parts)


def arguments_of_written(text: str) -> str:
    """An object with a JSON text, of which a grammar is given, as `input`."""
    return joined_grammar(_ARGUMENTS, parts_of("input", text))


def escaped_lark(grammar: str, check: GrammarCheck, escapes: Escapes) -> str:
    """Of the escaped forms of a grammar's texts. Where no rule contains itself, it is one terminal:
    the library's lexer does not look back, and where an escape begins it is not decided yet whether
    the next terminal does. Otherwise the terminals must be such that it need not. Raises
    InvalidRequestError."""
    escaped = _Definitions(_Escaping(grammar, escapes).run())
    if escaped.is_regular():
        return escaped.as_terminal()
    escaped.refuse_undecided(check)
    return "".join(each.text for each in escaped.pieces)


class _Piece(NamedTuple):
    kind: str
    text: str


class _Definitions:
    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self._bodies: dict[str, list[_Piece]] = {}
        self._imports: list[str] = []
        self._ignored: list[_Piece] = []
        self._has_attributes = False
        body = self._ignored
        position = 0
        while position < len(pieces):
            piece = pieces[position]
            head = self._head_end(position)
            if head is not None:
                while body and body[-1].text in ("?", "!") and _begins_line(body):
                    body.pop()
                body = self._bodies.setdefault(piece.text, [])
                position = head
                continue
            if piece.kind == "directive":
                body = self._ignored
            elif piece.kind == "import":
                self._imports.append(piece.text)
            body.append(piece)
            position += 1

    def is_regular(self) -> bool:
        return not (self._ignored_is_said or self._has_attributes) and not self._is_cyclic()

    def as_terminal(self) -> str:
        lines = ["start: RULE_START"]
        for name, body in self._bodies.items():
            written = "".join(map(self._renamed, body)).strip()
            lines.append(f"{self._terminal(name)}: {written}")
        return "\n".join([*lines, *self._imports])

    def refuse_undecided(self, check: GrammarCheck) -> None:
        """Raises InvalidRequestError where a terminal may go on with an escape at a position where
        another begins with one."""
        lexemes = {each.text: None for each in self._lexemes()}
        any_escape = r"/\x5C(.|\n)*/"
        goes_on = [
            each for each in lexemes if self._can_be(f"{each} & ({each} {any_escape})", check)
        ]
        begins = [each for each in lexemes if self._can_be(f"{each} & {any_escape}", check)]
        for each in goes_on:
            if any(other != each for other in begins):
                raise InvalidRequestError(
                    f"its rules contain themselves, or it ignores blanks, and {each[:80]} may go "
                    f"on with a line's end, quote or backslash where another part begins with one; "
                    f"write it without recursion, or leave these characters to parts of their own",
                    param="tools",
                )

    @property
    def _ignored_is_said(self) -> bool:
        return any(each.kind == "directive" for each in self._ignored)

    def _head_end(self, position: int) -> int | None:
        """After the colon of a definition that begins at a position, if one does."""
        if self.pieces[position].kind != "name":
            return None
        rest = "".join(each.text for each in self.pieces[position + 1 : position + MAX_HEAD_PIECES])
        before = "".join(each.text for each in self.pieces[max(0, position - 8) : position])
        head = _HEAD_REST.match(rest)
        if head is None or not _HEAD_BEFORE.search(before):
            return None
        self._has_attributes |= head[1] is not None
        num_chars, at = len(head[0]), position + 1
        while num_chars > 0:
            num_chars -= len(self.pieces[at].text)
            at += 1
        return at

    def _is_cyclic(self) -> bool:
        done: set[str] = set()
        open_names: set[str] = set()
        waiting: list[tuple[str, bool]] = [(name, False) for name in self._bodies]
        while waiting:
            name, is_end = waiting.pop()
            if is_end:
                open_names.discard(name)
                done.add(name)
            elif name in open_names:
                return True
            elif name not in done:
                open_names.add(name)
                waiting.append((name, True))
                used = {each.text for each in self._bodies[name] if each.kind == "name"}
                waiting += [(each, False) for each in used if each in self._bodies]
        return False

    def _lexemes(self) -> Iterator[_Piece]:
        bodies = [body for name, body in self._bodies.items() if not _is_terminal(name)]
        for each in (piece for body in (*bodies, self._ignored) for piece in body):
            if each.kind in ("string", "regex") or (
                each.kind == "name" and _is_terminal(each.text)
            ):
                yield each

    def _can_be(self, terminal: str, check: GrammarCheck) -> bool:
        lines = [f"start: PROBE\nPROBE: {terminal}"]
        for name, body in self._bodies.items():
            if _is_terminal(name):
                lines.append(f"{name}: {''.join(each.text for each in body).strip()}")
        return check(lark_grammar("\n".join([*lines, *self._imports]))) != NO_TEXT

    def _renamed(self, piece: _Piece) -> str:
        return self._terminal(piece.text) if piece.kind == "name" else piece.text

    def _terminal(self, name: str) -> str:
        return name if _is_terminal(name) else f"RULE_{name.upper()}"


def _begins_line(body: list[_Piece]) -> bool:
    return _HEAD_BEFORE.search("".join(each.text for each in body[-8:])) is not None


def _is_terminal(name: str) -> bool:
    return name == name.upper()


class _Escaping:
    def __init__(self, grammar: str, escapes: Escapes) -> None:
        self._grammar = grammar
        self._escapes = escapes
        self._place = 0

    def run(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        while self._place < len(self._grammar):
            pieces += self._next()
        return pieces

    def _next(self) -> list[_Piece]:
        imported = _IMPORT.match(self._grammar, self._place)
        if imported is not None:
            self._place = imported.end()
            return [*self._imported(imported)]
        found = _TOKEN.match(self._grammar, self._place)
        assert found is not None
        self._place = found.end()
        kind, text = str(found.lastgroup), found[0]
        match kind:
            case "dropped":
                return []
            case "string":
                return [self._string(text)]
            case "regex":
                return [self._regex(text)]
            case "directive" if text != "%ignore":
                raise _refused(text)
            case "special":
                raise _refused(f"the special token {text}")
            case "other" if text == "~":
                valid = _Piece("regex", f"/{self._escapes.any_text}/")
                return [*map(_other, "(~"), *self._atom(), *map(_other, " & "), valid, _other(")")]
            case _:
                return [_Piece(kind, text)]

    def _atom(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        depth = 0
        while self._place < len(self._grammar):
            found = self._next()
            pieces += found
            depth += sum((each.text == "(") - (each.text == ")") for each in found)
            if depth <= 0 and any(each.text.strip() for each in found):
                break
        return pieces

    def _string(self, written: str) -> _Piece:
        text = _string_value(written)
        between = _RANGE.match(self._grammar, self._place)
        last = between and _TOKEN.match(self._grammar, between.end())
        if between is not None and last is not None and last.lastgroup == "string":
            self._place = last.end()
            ends = [text, _string_value(last[0])]
            if any(len(each) != 1 for each in ends):
                raise _refused(f"the range {written}..{last[0]}")
            first, end = (rf"\x{{{ord(each):X}}}" for each in ends)
            return _Piece("regex", f"/{self._escapes.regex(f'[{first}-{end}]')}/")
        if written.endswith("i") and not {*text}.isdisjoint(self._escapes.characters):
            return _Piece("regex", f"/{self._escapes.regex(re.escape(text))}/i")
        rest = written[written.rindex('"') + 1 :]
        return _Piece("string", json.dumps(self._escapes.text(text), ensure_ascii=False) + rest)

    def _regex(self, written: str) -> _Piece:
        pattern, _, flags = written[1:].rpartition("/")
        if set(flags) - set("imsu"):
            raise _refused(f"the flags {flags} of {written}")
        escaped = self._escapes.regex(pattern, dot_is_any="s" in flags)
        return _Piece("regex", f"/{escaped}/{'i' if 'i' in flags else ''}")

    def _imported(self, found: "re.Match[str]") -> Iterator[_Piece]:
        names = [(found[1], found[2] or found[1])]
        if found[3] is not None:
            names = [(each.strip(), each.strip()) for each in found[3].split(",") if each.strip()]
        for name, alias in names:
            if name in _COMMON:
                yield from (_Piece("name", alias), *map(_other, ": "), self._regex(_COMMON[name]))
            else:
                yield _Piece("import", f"%import common.{name} -> {alias}")
            yield _other("\n")


def _other(text: str) -> _Piece:
    return _Piece("other", text)


def _string_value(written: str) -> str:
    try:
        value: str = json.loads(written.removesuffix("i"), strict=False)
    except ValueError:
        raise _refused(f"the text {written}") from None
    return value


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"it uses {what}, which cannot be followed within a call; give rules, texts in double "
        f"quotes and expressions",
        param="tools",
    )
