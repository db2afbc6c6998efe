"""The flags for choosing tokens: `SamplingFlags`, shared by `generate` and `chat`.

Owns their names and the reading of those that hold several values. Knows no bounds: those are
`SamplingParams`'s. Invariant: a flag that is not given leaves its field as the checkpoint
recommends it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, cast

import typer

from cadenza.cli.options import ENVIRONMENT_PREFIX

TokenIds = Sequence[int]
"""What `token_ids` gives; a `tuple` here would be a flag of several words."""


def token_biases(text: str) -> dict[int, float]:
    """A JSON object of token ids and biases, say {"12": -5}."""
    try:
        found: object = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError
        pairs = cast(dict[str, object], found)
        return {int(key): _number(value) for key, value in pairs.items()}
    except (ValueError, RecursionError):
        raise typer.BadParameter(
            f'{text!r} is no JSON object of token ids and biases, such as {{"12": -5}}'
        ) from None


def token_ids(text: str) -> tuple[int, ...]:
    """Token ids with commas between them."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of token ids, such as 5,6,7") from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return value


def _option(help: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, help=f"{help} (default: the model's).", **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and where an answer ends; what is not given is as the checkpoint
    recommends."""

    temperature: Annotated[
        float | None, _option("Randomness; 0 always takes the likeliest token")
    ] = None
    top_k: Annotated[int | None, _option("Choose among the k likeliest tokens")] = None
    top_p: Annotated[float | None, _option("Choose among the likeliest tokens of mass p")] = None
    min_p: Annotated[
        float | None, _option("Leave out tokens less likely than p times the likeliest")
    ] = None
    top_n_sigma: Annotated[
        float | None,
        typer.Option(
            help="Leave out tokens this many standard deviations of the logits below the likeliest."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            envvar=f"{ENVIRONMENT_PREFIX}SEED",
            show_envvar=False,
            help="Seed of every request, whose answer then does not depend on its place among the "
            "prompts (default: one for each, derived from 0 and its place).",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off the logit of every token already written.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time it was written.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _option("Makes tokens of prompt and answer less likely, above 1")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        typer.Option(
            parser=token_biases,
            metavar="JSON",
            help='Added to the logits of tokens, as {"12": -5}.',
        ),
    ] = None
    allowed_token_ids: Annotated[
        TokenIds | None,
        typer.Option(parser=token_ids, metavar="ID,ID,…", help="No other token is chosen."),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text that is not written; can be given repeatedly."),
    ] = None
    min_tokens: Annotated[int | None, _option("Tokens before which nothing ends the answer")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text that ends the answer; up to four times."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        typer.Option("--include-stop-str-in-output", help="Show the text that ended the answer."),
    ] = None
    stop_token_ids: Annotated[
        TokenIds | None,
        typer.Option(parser=token_ids, metavar="ID,ID,…", help="Tokens that end the answer."),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False
    skip_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--skip-special-tokens/--no-skip-special-tokens",
            help="Special tokens have no text (default: on).",
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """What was given, as keywords of `SamplingParams`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != []}
