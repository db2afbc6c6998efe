"""Choices of completions and chat completions: what a body asks of them, and their bytes.
Invariant: a stream is role or text chunks, one finish reason for each choice, usage if asked for,
and `[DONE]`, however it ends."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.calls.endpoint import (
    AnswerHead,
    GenerationRequest,
    LogprobEntry,
    PromptInfo,
    StreamEncoder,
    check_num_logprobs,
    check_stream_options,
    finite,
    schema_mark,
)
from cadenza.server.errors import ApiError, invalid_value
from cadenza.server.fields.sampling import MAX_CHOICES, GenerationBody, StreamOptions
from cadenza.server.fields.structured import form_field
from cadenza.server.fields.types import Schema, or_null
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, list_of, object_of, one_of
from cadenza.structured import StructuredOutput

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
ChoiceObject = dict[str, Any]


class ChoicesRequest(GenerationBody, GenerationRequest):
    """A body of an endpoint whose answers are choices, as completions and chat completions are."""

    def check_fields(self) -> None:
        """Checks the endpoint's own fields together. Raises ApiError (400)."""

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def form_field(self) -> str | None:
        return form_field(self.values.get)

    @property
    def form(self) -> StructuredOutput | None:
        return None if self.form_field is None else self.values[self.form_field]

    def check_together(self, limits: ServerLimits) -> None:
        check_stream_options(self.stream_options, self.stream)
        form_field(self.values.get)
        self.check_fields()
        num_prompts = self.num_prompts
        num_choices = num_prompts * self.n
        if num_choices > MAX_CHOICES:
            raise invalid_value(
                f"{num_prompts} prompts with n = {self.n} are {num_choices} answers; one call "
                f"may have at most {MAX_CHOICES}",
                "n",
            )
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            check_num_logprobs(name, self.values.get(name, 0), limits)


class ChunkEncoder(StreamEncoder):
    """OpenAI's (chat) completions. A choice's parts are requested in order; joined, they are the
    whole choice."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, head: AnswerHead, body: ChoicesRequest) -> None:
        super().__init__(head)
        # Copies of what is read for every token.
        self._num_top_logprobs = body.num_top_logprobs
        self._shows_ids = body.return_token_ids
        # If so, a token is shown even if it adds no text.
        self._shows_tokens = self._num_top_logprobs is not None or self._shows_ids
        self._begun: set[int] = set()
        asked = body.stream_options or StreamOptions({})
        self._n, self._num_choices = body.n, body.num_prompts * body.n
        self._include_usage = asked.include_usage
        # By itself it asks for no usage.
        self._continuous_usage = asked.include_usage and asked.continuous_usage_stats
        self._before = self._make_before()
        self._is_before_fixed = head.system_fingerprint is not None
        self._after = self._make_after(None)
        # Until a chunk has the prompt's fields, or always where all have the usage.
        self._is_prompt_due = True
        self._is_after_fixed = False

    def begin(self, index: int) -> ChoiceObject | None:
        """The first part of a streamed choice, before there is any token."""
        del index
        return None

    @abstractmethod
    def part(
        self, index: int, output: CompletionOutput, request: PromptInfo
    ) -> ChoiceObject | None:
        """The next part of a streamed choice; None when there is nothing to show."""

    @abstractmethod
    def whole_choice(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject: ...

    def shows(self, index: int, content: object, output: CompletionOutput) -> bool:
        """Whether a part with this content is sent; the first one of a choice always is."""
        if index not in self._begun:
            self._begun.add(index)
            return True
        has_tokens = self._shows_tokens and output.token_ids
        return bool(content or output.finish_reason is not None or has_tokens)

    def about_prompt(self, request: PromptInfo | None) -> dict[str, Any] | None:
        """The fields next to the choices; None while not all are known; without values if `request`
        is None."""
        del request
        return {}

    def opening(self) -> bytes:
        made: list[bytes] = []
        for index in range(self._num_choices):
            part = self.begin(index)
            if part is not None:
                after = self._make_after(None) if self._continuous_usage else self._after
                made += [self._before, _encode(part), after]
        return b"".join(made)

    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        made: list[bytes] = []
        if not self._is_before_fixed and self.head.system_fingerprint is not None:
            self._before, self._is_before_fixed = self._make_before(), True
        for output in outputs:
            part = self.part(prompt * self._n + output.index, output, request)
            if part is not None:
                _add_end(part, output)
                after = self._after if self._is_after_fixed else self._next_after(request)
                made += (self._before, _encode(part), after)
        return b"".join(made)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        fields = self.head.fields(self.id_prefix, self.chunk_name)
        last: dict[str, Any] = {**fields, "choices": [], "usage": self.head.usage.as_object()}
        return b"data: " + _encode(last) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices: list[ChoiceObject] = []
        about_prompt: dict[str, Any] | None = None
        for prompt, request in enumerate(outputs):
            about_prompt = self.about_prompt(request)
            for output in request.outputs:
                choices.append(self.whole_choice(prompt * self._n + output.index, output, request))
                _add_end(choices[-1], output)
        fields = self.head.fields(self.id_prefix, self.object_name)
        about_prompt = about_prompt or self.about_prompt(None) or {}
        usage = self.head.usage.as_object()
        return _encode({**fields, "choices": choices, "usage": usage, **about_prompt})

    def _make_before(self) -> bytes:
        chunk = _encode(self.head.fields(self.id_prefix, self.chunk_name))
        return b"data: " + chunk[:-1] + b',"choices":['

    def _make_after(self, about_prompt: dict[str, Any] | None) -> bytes:
        rest: dict[str, Any] = {}
        if self._include_usage:
            rest["usage"] = self.head.usage.as_object() if self._continuous_usage else None
        rest |= about_prompt or self.about_prompt(None) or {}
        return (b"]," + _encode(rest)[1:] if rest else b"]}") + b"\n\n"

    def _next_after(self, request: PromptInfo) -> bytes:
        """What follows the choices of a chunk that has the prompt's fields or the usage."""
        about_prompt = self.about_prompt(request) if self._is_prompt_due else None
        if about_prompt is not None:
            self._is_prompt_due = False
            self._is_after_fixed = not self._continuous_usage
        return self._make_after(about_prompt)


def _add_end(choice: ChoiceObject, output: CompletionOutput) -> None:
    if output.receipt is not None:
        choice["receipt"] = output.receipt
    choice |= schema_mark(output)


def shown_prompt(request: PromptInfo) -> list[dict[str, Any] | None]:
    """The log probabilities of a prompt's tokens."""
    return [None if entry is None else _by_id(entry) for entry in prompt_entries(request)]


def prompt_entries(request: PromptInfo) -> list[LogprobEntry | None]:
    """One for each of the prompt's tokens; the first has none."""
    found: Sequence[LogprobEntry | None] = request.prompt_logprobs or ()
    missing = len(request.prompt_token_ids) - len(found)
    return [*[None] * missing, *found]


def _by_id(entry: LogprobEntry) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": finite(found),
            "rank": found.rank,
            "decoded_token": found.decoded_token,
        }
        for token_id, found in entry.items()
    }


_IDS: Schema = or_null(list_of(COUNT))
_USAGE = object_of({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
PROMPT_SCHEMA: dict[str, Schema] = {
    "prompt_token_ids": _IDS,
    "prompt_logprobs": or_null(list_of(or_null({"type": "object"}))),
}
"""The fields of an answer that are about a prompt."""


def choices_answer(
    name: str, object_name: str, content: dict[str, Schema], rest: dict[str, Schema]
) -> AnswerSchema:
    """Of a whole answer in OpenAI's shape; `content` is in each choice, `rest` next to the
    choices."""
    reasons = one_of("stop", "length", "abort", "tool_calls")
    choice = {"index": COUNT, **content, "token_ids": _IDS, "finish_reason": reasons}
    schema = object_of(
        {
            "id": TEXT,
            "created": COUNT,
            "model": TEXT,
            "system_fingerprint": or_null(TEXT),
            "usage": _USAGE,
            "object": one_of(object_name),
            "choices": {**list_of(object_of(choice)), "minItems": 1},
            **rest,
        }
    )
    return AnswerSchema(name=name, schema=schema)
