"""`StructuredOutput` becomes the text of a grammar, as llguidance reads it.

Owns the notations that are accepted, and the bounds of grammars. Knows no tokens. Invariant: a
grammar that passes `grammar_check` enforces everything that was asked for.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.structured import StructuredOutput
from cadenza.text.json_schema import exact_schema

GrammarCheck = Callable[[str], str | None]
"""What is wrong with a grammar; None if it can be followed."""

StartChecks = Callable[[], GrammarCheck]
"""Makes the check of one request's grammars, which may have a bound on their time together."""

_MAX_ERROR_CHARS = 300

WHITESPACE = r"[ \n\t]{1,16}"
"""Between the tokens of JSON. Without a bound a model may go on with blanks for ever."""

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


def grammar_of(structured: StructuredOutput) -> str:
    """The grammar of a structured output. Raises InvalidRequestError."""
    match structured.kind:
        case "json":
            return json_grammar(cast(str, structured.json))
        case "json_object":
            return json_grammar(_ANY_OBJECT)
        case "regex":
            return _library().grammar_from_regex(structured.regex)
        case "choice":
            # One terminal: rules would be an alternative each, of which few may be open at once.
            options = " | ".join(json.dumps(each) for each in structured.choice or ())
            return lark_grammar(f"start: CHOICE\nCHOICE: {options}")
        case _:
            return lark_grammar(_as_lark(structured.grammar or ""))


def json_grammar(schema: str) -> str:
    """The grammar of a JSON Schema, given as JSON. Raises InvalidRequestError."""
    exact = exact_schema(schema)
    try:
        return _library().grammar_from_json_schema(
            exact, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError:
        raise refused("the JSON schema cannot be read; check its keywords") from None


def lark_grammar(lark: str) -> str:
    return _library().grammar_from_lark(lark)


def refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="structured")


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's notation; one in GBNF is converted."""
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
