"""`StructuredOutput` becomes the text of a grammar, as llguidance reads it; its notations and
bounds.

Invariant: a grammar that passes `grammar_check` enforces everything that was asked for."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.schemas.json_schema import JsonGrammar, compile_schema

GrammarCheck = Callable[[str], str | None]
"""What is wrong with a grammar; None if it can be followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormChecks:
    """`start`: makes the check of one request's grammars, which may have a bound on their time
    together; `is_valid`: whether a text, the first argument, is JSON of a schema; `is_inline`:
    answers are checked where their outputs are made; otherwise whoever reads them checks them, on a
    thread."""

    start: Callable[[], GrammarCheck]
    is_valid: Callable[[str, str], bool]
    is_inline: bool = True


_MAX_ERROR_CHARS = 300

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


FORMS_REVISION = 5
"""To be raised when the grammar of a request that was accepted before changes."""

DEFAULT_STYLE = JsonStyle(max_string=4096, max_items=512, max_depth=16)
"""Of answers in a form: each of them ends."""

ARGUMENTS_STYLE = JsonStyle()
"""Of tools' arguments: a file that an agent writes may be long."""


MAX_CACHED_FORMS = 64
"""Of the newest; the prompts and samples of a request have the same one."""


def name_forms(style: JsonStyle, parsers: Sequence[str]) -> str:
    """What decides the grammar of an answer besides its request, for the fingerprint."""
    described = repr((style, sorted(LIMITS.items()), *parsers))
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    return f"{FORMS_REVISION}-llguidance-{version('llguidance')}-{digest}"


def grammar_of(structured: StructuredOutput) -> str:
    """The grammar of a structured output. Raises InvalidRequestError."""
    return read_form(structured).text


@lru_cache(maxsize=MAX_CACHED_FORMS)
def read_form(structured: StructuredOutput, style: JsonStyle = DEFAULT_STYLE) -> JsonGrammar:
    """As `grammar_of`, with what the grammar does not hold. Raises InvalidRequestError."""
    if structured.whitespace is not None:
        style = replace(style, whitespace=structured.whitespace)
    match structured.kind:
        case "json":
            text = cast(str, structured.json)
            return compile_schema(text, style, is_strict=structured.strict)
        case "json_object":
            return compile_schema(_ANY_OBJECT, style, is_strict=False)
        case "regex":
            return JsonGrammar(text=_library().grammar_from_regex(structured.regex))
        case "choice":
            # One terminal: rules would be an alternative each, of which few may be open at once.
            options = " | ".join(json.dumps(each) for each in structured.choice or ())
            return JsonGrammar(text=lark_grammar(f"start: CHOICE\nCHOICE: {options}"))
        case _:
            return JsonGrammar(text=lark_grammar(_as_lark(structured.grammar or "")))


def lark_grammar(lark: str) -> str:
    return _library().grammar_from_lark(lark)


def refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="structured")


def _as_lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise refused(f"the grammar is not valid GBNF: {str(error)[:_MAX_ERROR_CHARS]}") from error


def _library() -> Any:
    # Imported where a request needs it: most have no structured output.
    from llguidance import LLMatcher

    return LLMatcher
