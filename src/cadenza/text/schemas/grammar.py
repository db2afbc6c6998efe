"""`StructuredOutput` becomes the text of a grammar, as llguidance reads it, in parts or whole;
`check_grammar` says whether it can be followed within `LIMITS`. Invariant: a grammar without a
problem enforces everything that was asked for; what cannot be enforced is refused by its name."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.schemas.json_schema import NO_TEXT, JsonGrammar, compile_schema, library
from cadenza.text.schemas.schema_check import is_valid

GrammarCheck = Callable[[str], str | None]  # what is wrong with a grammar, if anything


@dataclass(frozen=True, slots=True, kw_only=True)
class FormChecks:
    """How the forms of requests, and answers in them, are checked."""

    start: Callable[[], GrammarCheck]  # of one request's grammars, perhaps with a bound in all
    is_valid: Callable[[str, str], bool]  # whether a text is JSON of a schema
    is_inline: bool = True  # where outputs are made; otherwise by whoever reads them, on a thread


MAX_ERROR_CHARS = 300

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "verbose_errors": False,
}
"""Of llguidance's `LLParserLimits`: they bound the time and memory of a grammar and of each mask.
They do not depend on the machine, so that a stream ends at the same token everywhere."""

_ANY_OBJECT = '{"type": "object"}'


FORMS_REVISION = 5  # to be raised when the grammar of a request that was accepted before changes
DEFAULT_STYLE = JsonStyle(max_string=4096, max_items=512, max_depth=16)
"""Of answers in a form: each of them ends."""

ARGUMENTS_STYLE = JsonStyle()  # of tools' arguments: a file that an agent writes may be long


MAX_CACHED_FORMS = 64  # of the newest; the prompts and samples of a request have the same one


def name_forms(style: JsonStyle, parsers: Sequence[str]) -> str:
    """What decides the grammar of an answer besides its request, for the fingerprint."""
    described = repr((style, sorted(LIMITS.items()), *parsers))
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    return f"{FORMS_REVISION}-llguidance-{version('llguidance')}-{digest}"


def grammar_of(structured: StructuredOutput) -> str:
    return read_form(structured).text


@lru_cache(maxsize=MAX_CACHED_FORMS)
def read_form(structured: StructuredOutput, style: JsonStyle = DEFAULT_STYLE) -> JsonGrammar:
    """With what the grammar does not hold. Raises InvalidRequestError."""
    if structured.whitespace is not None:
        style = replace(style, whitespace=structured.whitespace)
    match structured.kind:
        case "json":
            text = cast(str, structured.json)
            return compile_schema(text, style, is_strict=structured.strict)
        case "json_object":
            return compile_schema(_ANY_OBJECT, style, is_strict=False)
        case "regex":
            return JsonGrammar(text=library().grammar_from_regex(structured.regex))
        case "choice":
            # One terminal: rules would be an alternative each, of which few may be open at once.
            options = " | ".join(json.dumps(each) for each in structured.choice or ())
            return JsonGrammar(text=lark_grammar(f"start: CHOICE\nCHOICE: {options}"))
        case _:
            return JsonGrammar(text=lark_grammar(_as_lark(structured.grammar or "")))


def lark_grammar(lark: str) -> str:
    return library().grammar_from_lark(lark)


def refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="structured")


def _as_lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise refused(f"the grammar is not valid GBNF: {str(error)[:MAX_ERROR_CHARS]}") from error


def parts_of(name: str, grammar: str) -> list[dict[str, Any]]:
    first, *others = _read(grammar)
    return [{**first, "name": name}, *others]


def joined_grammar(lark: str, others: Sequence[Mapping[str, Any]]) -> str:
    """A grammar, and those that it refers to by their names; of equal ones one is kept."""
    distinct: list[Mapping[str, Any]] = []
    for each in others:
        if each not in distinct:
            distinct.append(each)
    return json.dumps({"grammars": [{"lark_grammar": lark}, *distinct]}, ensure_ascii=False)


def _read(grammar: str) -> list[dict[str, Any]]:
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    found: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return [{name: value for name, value in each.items() if value is not None} for each in found]


MAX_CACHED = 64  # results of this process; a grammar has some 100 KB
TRIAL_BYTES = 64  # of a trial, which takes one of the bytes that may follow at each place

# A byte has fewer continuations than a token, of which one mask looks at all.
TRIAL_LIMITS: Mapping[str, Any] = {**LIMITS, "step_max_items": 2_000, "verbose_errors": True}
_IMPOSSIBLE = NO_TEXT.partition(";")[0]
_UNSATISFIABLE = "Unsatisfiable schema: "
_NO_MATCH = "Regex is empty"
_STATES = "its expressions have too many states"
_SIZE = "its rules have too many parts"
_PLACE = re.compile(r"(at \d+\(\d+\): )?failed to compile JSON schema: ")
_BOUNDS: Mapping[str, str] = {  # bounds that messages name, in words; the advice follows them
    "Current row has": "at one place of it over {max_items_in_row} parts of rules may follow",
    "Too many items": "its rules can be read in too many ways at once",
    "lexer error": _STATES,
    "lexer precomputation": _STATES,
    "fuel exhausted": _STATES,
    "Unable to determine if regex is empty": _STATES,
    "grammar size": _SIZE,
    "grammar.symbols.len": _SIZE,
}

ADVICE = "use fewer alternatives, optional properties and counted repetitions"


@lru_cache(maxsize=MAX_CACHED)
def check_grammar(grammar: str) -> str | None:
    """A `GrammarCheck` in this process, bounded only by `LIMITS`; the newest results are kept."""
    from llguidance import LLMatcher, LLParserLimits

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**LIMITS)
    )
    if is_error:
        return described(messages[0])
    if any("no tokenizer" in each for each in messages):
        return "it names special tokens, which are not supported here; write their text"
    unenforced = [each for each in messages if "Unimplemented" in each]
    return described(unenforced[0]) if unenforced else _try(grammar)


IN_PROCESS = FormChecks(start=lambda: check_grammar, is_valid=is_valid)


def described(message: str) -> str:
    """The library's message about the client's own text, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    lines[0] = _PLACE.sub("", lines[0])
    if lines[0].startswith("Unimplemented keys: "):
        names = ", ".join(json.loads(lines[0].removeprefix("Unimplemented keys: ")))
        return f"it uses {names}, which cannot be enforced; leave it out"
    if lines[0].startswith("NoExtension"):
        return NO_TEXT
    if lines[0].startswith(_UNSATISFIABLE):
        reason = lines[0].removeprefix(_UNSATISFIABLE)
        return (
            NO_TEXT
            if reason.startswith(_NO_MATCH)
            else f"{_IMPOSSIBLE}: {reason}"[:MAX_ERROR_CHARS]
        )
    for begin, words in _BOUNDS.items():
        if begin in lines[0]:
            return f"{words.format_map(LIMITS)}; {ADVICE}"
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines)[0][:MAX_ERROR_CHARS]


def _try(grammar: str) -> str | None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    matcher = LLMatcher(
        LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**TRIAL_LIMITS)
    )
    rng = random.Random(0)  # noqa: S311  the same way each time, not a secret
    forced: list[int] = []  # bytes that must follow, found once: each mask would find them anew
    for _ in range(TRIAL_BYTES):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = forced[:1] or _allowed_bytes(matcher.compute_bitmask())
        if matcher.is_error() or not allowed:
            break
        if len(allowed) == 1 and not forced:
            forced = matcher.compute_ff_tokens()
        byte = rng.choice(allowed)
        matcher.consume_token(byte)
        forced = forced[1:] if forced[:1] == [byte] else []
    return described(matcher.get_error()) if matcher.is_error() else None


def _allowed_bytes(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [byte for byte in range(256) if bits >> byte & 1]
