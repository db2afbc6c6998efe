"""`StructuredOutput` becomes the text of a grammar, as llguidance reads it.

Owns what is accepted of each notation, and the errors of what is not. Knows no tokens. Invariant: a
grammar that passes `check_grammar` enforces everything that was asked for; a keyword that cannot be
enforced is refused by its name, never left out.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.structured import StructuredOutput

GrammarCheck = Callable[[str], str | None]
"""What is wrong with a grammar; None if it can be followed."""

MAX_ERROR_CHARS = 300

WHITESPACE = r"[ \n\t]{1,16}"
"""Between the tokens of JSON. Without a bound a model may go on with blanks for ever."""

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
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
            options = " | ".join(json.dumps(each) for each in structured.choice or ())
            return lark_grammar(f"start: {options}")
        case _:
            return lark_grammar(_as_lark(structured.grammar or ""))


def json_grammar(schema: str) -> str:
    """The grammar of a JSON Schema, given as JSON. Raises InvalidRequestError."""
    try:
        parsed: object = json.loads(schema)
    except (ValueError, RecursionError):
        raise refused("the JSON schema is not valid JSON, or is nested too deep") from None
    if parsed is True:
        schema = "{}"
    elif not isinstance(parsed, dict):
        raise refused("the JSON schema is neither an object nor true")
    elif "x-guidance" in parsed:
        raise refused("the JSON schema has x-guidance, which is not a keyword here; leave it out")
    try:
        return _library().grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError:
        raise refused("the JSON schema cannot be read; check its keywords") from None


def lark_grammar(lark: str) -> str:
    return _library().grammar_from_lark(lark)


def check_grammar(grammar: str) -> str | None:
    """A `GrammarCheck` in this process. Its time and memory are bounded only by `LIMITS`."""
    from llguidance import LLMatcher, LLParserLimits

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**LIMITS)
    )
    if is_error:
        return _described(messages[0])
    if any("no tokenizer" in each for each in messages):
        return "it names special tokens, which are not supported here; write their text"
    unenforced = [each for each in messages if "Unimplemented" in each]
    return _described(unenforced[0]) if unenforced else None


def refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="structured")


def _described(message: str) -> str:
    """The library's message about the client's own text, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    if lines[0].startswith("Unimplemented keys: "):
        names = ", ".join(json.loads(lines[0].removeprefix("Unimplemented keys: ")))
        return f"it uses {names}, which cannot be enforced; leave it out"
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines)[0][:MAX_ERROR_CHARS]


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's notation; one in GBNF is converted."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise refused(f"the grammar is not valid GBNF: {str(error)[:MAX_ERROR_CHARS]}") from error


def _library() -> Any:
    # Imported where a request needs it: most have no structured output.
    from llguidance import LLMatcher

    return LLMatcher
