"""`SamplingFlags`, of `request.PARAMETERS`, shared by `generate` and `chat`.

Invariant: a flag that is not given leaves its field as the checkpoint recommends it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, cast

from cadenza.bounds import NumberBound, SamplingParameter
from cadenza.cli.options import parsed
from cadenza.option import flag
from cadenza.request import DEFAULTS, PARAMETERS
from cadenza.structured import StructuredOutput

# The flags that ask for a form of the answer, and their members of `StructuredOutput`.
FORMS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _biases(text: str) -> dict[int, float]:
    found: object = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    pairs = cast(dict[str, object], found)
    return {int(key): _number(value) for key, value in pairs.items()}


token_biases = parsed(_biases, 'not a JSON object of token ids and biases, such as {"12": -5}')
token_ids = parsed(
    lambda text: tuple(int(each) for each in text.split(",")),
    "not a list of token ids, such as 5,6,7",
)


def _schema(text: str) -> str:
    is_schema = text.lstrip().startswith("{") or text.strip() in ("true", "false")
    return text if is_schema else Path(text).read_text(encoding="utf-8")


def _grammar(text: str) -> str:
    is_grammar = ":" in text and not Path(text).exists()
    return text if is_grammar else Path(text).read_text(encoding="utf-8")


schema_text = parsed(
    _schema, 'neither a JSON Schema, such as {"type": "object"}, nor a file that can be read'
)
grammar_text = parsed(
    _grammar, "neither a grammar, such as 'start: \"a\"', nor a file that can be read"
)


def _drafts(text: str) -> bool | int:
    """A number is bounded by `SamplingParams`."""
    words = {"true": True, "false": False}
    if text not in words and not text.isdecimal():
        raise ValueError
    return words[text] if text in words else int(text)


speculative = parsed(_drafts, "not true, false or a number of drafts")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return value


# Parameters whose flags are a command's own, or below.
_OF_COMMANDS = (
    *("max_tokens", "n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
    *("structured", "spec_prefill"),
)

_SEED_HELP = (
    "Seed of every request, whose answer then does not depend on its place among the prompts "
    "(default: one for each, derived from 0 and its place)."
)
_PARSED: Mapping[str, Mapping[str, Any]] = {
    "logit_bias": {"parser": token_biases, "metavar": "JSON"},
    "speculative": {"parser": speculative, "metavar": "true|false|N"},
}


def _flag_of(name: str, declared: SamplingParameter) -> tuple[str, Any, Any]:
    """Name, type and flag; None is as the checkpoint recommends."""
    help, within, settings = declared.help, declared.within, _PARSED.get(name, {})
    if declared.recommended is not None or DEFAULTS[name] is True:
        default = "on" if declared.recommended is None else "the model's"
        help = f"{help.removesuffix('.')} (default: {default})."
    kind: Any = bool if isinstance(DEFAULTS[name], bool) else Any
    if isinstance(within, NumberBound):
        kind = int if within.is_integer else float
    elif within is not None and within.max_chars is not None:
        kind, help, settings = list[str], f"{help} Repeatable.", {"metavar": "TEXT"}
    elif within is not None:
        settings = {"parser": token_ids, "metavar": "ID,ID,…"}
    if name == "seed":
        return name, kind | None, flag(None, _SEED_HELP, has_variable=True)
    return name, kind | None, flag(None, help, **settings)


_FLAGS = [_flag_of(name, each) for name, each in PARAMETERS.items() if name not in _OF_COMMANDS]
_Declared: Any = make_dataclass("_Declared", _FLAGS, kw_only=True, frozen=True, slots=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(_Declared):
    """How tokens are chosen and where an answer ends."""

    whole_prompt: bool = flag(False, "Compute the whole prompt, whatever --spec-prefill says.")

    json_schema: str | None = flag(
        None, "A JSON Schema, or a file with one, that the answer follows.", parser=schema_text
    )
    regex: str | None = flag(None, "A regular expression that the whole answer matches.")
    choice: list[str] | None = flag(
        None, "A text that the answer may be; given repeatedly, once for each.", metavar="TEXT"
    )
    grammar: str | None = flag(
        None,
        "A grammar that the answer follows, in Lark's notation or GBNF, or a file with one.",
        parser=grammar_text,
    )

    def changes(self) -> dict[str, Any]:
        """As keywords of `SamplingParams`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        if given.pop("whole_prompt"):
            given["spec_prefill"] = False
        asked = {FORMS[name]: given.pop(name) for name in FORMS if name in given}
        return {**given, "structured": StructuredOutput(**asked)} if asked else given
