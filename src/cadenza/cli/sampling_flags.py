"""The flags of sampling parameters: `SamplingFlags`, shared by `generate` and `chat`.

Owns their names and the parsing of those that hold several values. Invariant: a flag that is not
given leaves its field as the checkpoint recommends it.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from cadenza.cli.options import parsed
from cadenza.option import flag
from cadenza.structured import StructuredOutput

FORMS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The flags that ask for a form of the answer, and their members of `StructuredOutput`."""


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


def _recommended(help: str) -> Any:
    return flag(None, f"{help} (default: the model's).")


def _token_ids(help: str) -> Any:
    return flag(None, help, parser=token_ids, metavar="ID,ID,…")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and where an answer ends; None is as the checkpoint recommends."""

    temperature: float | None = _recommended("Randomness; 0 always takes the likeliest token")
    top_k: int | None = _recommended("Choose among the k likeliest tokens")
    top_p: float | None = _recommended("Choose among the likeliest tokens of mass p")
    min_p: float | None = _recommended(
        "Leave out tokens less likely than p times the likeliest one"
    )
    top_n_sigma: float | None = flag(
        None,
        "Leave out tokens whose logits are this many standard deviations below the highest one.",
    )
    seed: int | None = flag(
        None,
        "Seed of every request, whose answer then does not depend on its place among the prompts "
        "(default: one for each, derived from 0 and its place).",
        has_variable=True,
    )
    presence_penalty: float | None = flag(
        None, "Subtracted from the logit of every token that the answer already has."
    )
    frequency_penalty: float | None = flag(None, "The same, once for each time it occurs.")
    repetition_penalty: float | None = _recommended(
        "Above 1, makes tokens of prompt and answer less likely"
    )
    logit_bias: dict[int, float] | None = flag(
        None, 'Added to the logits of tokens, as {"12": -5}.', parser=token_biases, metavar="JSON"
    )
    allowed_token_ids: tuple[int, ...] | None = _token_ids("The only tokens that may be chosen.")
    bad_words: list[str] | None = flag(
        None, "A text that the answer may not contain; can be given repeatedly.", metavar="TEXT"
    )
    min_tokens: int | None = _recommended("Tokens before which nothing ends the answer")
    stop: list[str] | None = flag(
        None, "A text that ends the answer; up to 64 times.", metavar="TEXT"
    )
    include_stop_str_in_output: bool | None = flag(None, "Keep the text that ended the answer.")
    stop_token_ids: tuple[int, ...] | None = _token_ids("Tokens that end the answer.")
    ignore_eos: bool = flag(False, "Continue after the end-of-sequence token.")
    skip_special_tokens: bool | None = flag(
        None, "Leave special tokens out of the text (default: on)."
    )

    speculative: int | None = flag(
        None,
        "Whether steps verify drafts (true, false), or at most how many in a step "
        "(default: as --speculative-config says).",
        parser=speculative,
        metavar="true|false|N",
    )

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
        """What was given, as keywords of `SamplingParams`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        if given.pop("whole_prompt"):
            given["spec_prefill"] = False
        asked = {FORMS[name]: given.pop(name) for name in FORMS if name in given}
        return {**given, "structured": StructuredOutput(**asked)} if asked else given
