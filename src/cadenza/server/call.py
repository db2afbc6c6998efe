"""A checked body as what it asks for: `Call`.

Owns what fields mean together, and how they become `SamplingParams`. Knows no HTTP and no engine.
Invariant: a `Call` that exists can be served, unless its prompt is too long or its tokens unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cadenza.engine.text_face import TextFace
from cadenza.request import SamplingParams, show
from cadenza.server.errors import invalid_value
from cadenza.server.fields import MAX_ANSWERS, UnknownFields, check_body, sampling_values
from cadenza.server.json_body import read_json
from cadenza.server.limits import ServerLimits

COMPLETION_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client asked for. `values` are the checked fields that were there; `num_body_bytes`
    is the size of the body that they came in."""

    endpoint: Literal["completions", "chat"]
    values: Mapping[str, Any]
    num_body_bytes: int

    @property
    def model(self) -> str | None:
        return self.values.get("model")

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.values["prompt"]

    @property
    def prompt_field(self) -> str:
        """What a client calls the prompt here."""
        return "prompt" if self.endpoint == "completions" else "messages"

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return self.values["messages"]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) if self.endpoint == "completions" else 1

    @property
    def n(self) -> int:
        return self.values.get("n", 1)

    @property
    def is_stream(self) -> bool:
        return self.values.get("stream", False)

    @property
    def echo(self) -> bool:
        return self.values.get("echo", False)

    @property
    def logprobs(self) -> int | None:
        """How many likeliest tokens to tell of; None: no log probabilities."""
        if self.endpoint == "completions":
            return self.values.get("logprobs")
        return self.values.get("top_logprobs", 0) if self.values.get("logprobs") else None

    @property
    def has_prompt_logprobs(self) -> bool:
        return "prompt_logprobs" in self.values

    @property
    def return_token_ids(self) -> bool:
        return self.values.get("return_token_ids", False)

    @property
    def return_tokens_as_token_ids(self) -> bool:
        """Log probabilities name tokens by their ids, which unlike texts are all different."""
        return self.values.get("return_tokens_as_token_ids", False)

    @property
    def add_special_tokens(self) -> bool:
        return self.values.get("add_special_tokens", True)

    @property
    def include_usage(self) -> bool:
        return self._stream_option("include_usage")

    @property
    def continuous_usage(self) -> bool:
        """It says where usage goes, and asks for none by itself."""
        return self.include_usage and self._stream_option("continuous_usage_stats")

    @property
    def template_kwargs(self) -> Mapping[str, bool]:
        return template_kwargs(self.values)

    @property
    def is_without_reasoning(self) -> bool:
        return self.values.get("reasoning_effort") == "none"

    @property
    def cache_salt(self) -> str:
        return self.values.get("cache_salt", "")

    @property
    def request_id(self) -> str | None:
        return self.values.get("request_id")

    @property
    def user(self) -> str | None:
        return self.values.get("user")

    def sampling(self, text: TextFace) -> SamplingParams:
        """How to choose the tokens, on top of what the checkpoint recommends.

        Raises:
            InvalidRequestError: the values do not go together.
        """
        changes = sampling_values(self.values)
        if self.endpoint == "completions":
            changes.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
        else:
            changes["max_tokens"] = self.values.get(
                "max_completion_tokens", changes.get("max_tokens")
            )
        if self.logprobs is not None:
            changes["logprobs"] = self.logprobs
            if self.echo:
                changes["prompt_logprobs"] = max(
                    self.logprobs, self.values.get("prompt_logprobs", 0)
                )
        return text.default_params(**changes)

    def _stream_option(self, name: str) -> bool:
        return cast(Mapping[str, bool], self.values.get("stream_options", {})).get(name, False)


def read_call(
    endpoint: Literal["completions", "chat"],
    body: bytes,
    limits: ServerLimits,
    unknown: UnknownFields = "refuse",
) -> Call:
    """Raises ApiError (400) naming the field at fault."""
    values = check_body(endpoint, read_json(body), unknown)
    call = Call(endpoint=endpoint, values=values, num_body_bytes=len(body))
    if "stream_options" in values and not call.is_stream:
        raise invalid_value("stream_options are for streams; set stream, too", "stream_options")
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise invalid_value("top_logprobs needs logprobs; set it to true, too", "top_logprobs")
    asked = [values.get(name) for name in ("max_tokens", "max_completion_tokens")]
    if None not in asked and asked[0] != asked[1]:
        raise invalid_value(
            f"max_tokens is {asked[0]} and max_completion_tokens {asked[1]}; give one of them",
            "max_completion_tokens",
        )
    if call.num_prompts * call.n > MAX_ANSWERS:
        raise invalid_value(
            f"{call.num_prompts} prompts with n = {call.n} are {call.num_prompts * call.n} "
            f"answers; at most {MAX_ANSWERS} are given to one call",
            "n",
        )
    template_kwargs(values)
    _check_logprobs(values, limits)
    return call


def template_kwargs(values: Mapping[str, Any]) -> dict[str, bool]:
    """What a chat template is rendered with. Raises ApiError (400)."""
    is_continued: bool = values.get("continue_final_message", False)
    is_begun: bool = values.get("add_generation_prompt", not is_continued)
    if is_continued and is_begun:
        raise invalid_value(
            "continue_final_message and add_generation_prompt are both true; the prompt ends "
            "either within the last message or after the beginning of a new one: set one of them",
            "continue_final_message",
        )
    switches: Mapping[str, bool] = values.get("chat_template_kwargs", {})
    return {
        **switches,
        "add_generation_prompt": is_begun,
        "continue_final_message": is_continued,
    }


def _check_logprobs(values: Mapping[str, Any], limits: ServerLimits) -> None:
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = values.get(name, 0)
        if value > limits.max_logprobs:
            raise invalid_value(
                f"{name} is {show(value)}; this server gives at most {limits.max_logprobs} "
                f"(--max-logprobs)",
                name,
            )
