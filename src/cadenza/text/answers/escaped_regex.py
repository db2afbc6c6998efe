r"""`Escapes`: rewrites an expression to one of the same texts as they are written within JSON:
quotes, backslashes and control characters by their escapes. Invariant: the result matches the
escaped form of each text that the expression matches, and nothing else; what cannot be rewritten is
refused by name."""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.errors import InvalidRequestError

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
                    raise _refused(f"the group {pattern[position : position + 4]}")
                yield group[0]
                position = group.end()
                continue
            if character in "^$":
                raise _refused(f"{character} within an expression")
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
            raise _refused(rf"\{letter}")
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
            raise _refused(f"the class {written}, which has classes or operators within it")
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
        raise _refused(code[0]) from None


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
        raise _refused(f"the class [{body}]") from None
    return is_negated != (found or any(_has(each, character) for each in properties))


def _has(named: "re.Match[str]", character: str) -> bool:
    name = named[2] or named[3]
    if not re.fullmatch(r"[CLMNPSZ][a-z]?", name) or "^" in named[0]:
        raise _refused(named[0])
    return unicodedata.category(character).startswith(name) == (named[1] == "p")


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"its expressions use {what}, which cannot be followed within a call; write it otherwise",
        param="tools",
    )
