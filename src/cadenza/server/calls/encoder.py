"""Bytes of answers: JSON objects, and streams of server-sent events (SSE), whose common bytes are
encoded once. Invariant: a stream is role or text chunks, one finish reason for each choice, usage
if asked for, and `[DONE]`, however it ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.calls.record import AnswerTimes, Usage
from cadenza.server.errors import ApiError
from cadenza.server.fields.sampling import GenerationBody, StreamOptions

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment."""

_encode = msgspec.json.encode

ChoiceObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before it begins; `usage` and `times` are those of the answer so
    far. `text`: the model's. `read_fingerprint`: None until it is known. `now`: seconds since 1970,
    for the time of a chunk; None: `created` is that of all."""

    request_id: str
    created: int
    model: str
    text: TextFrontend
    usage: Usage = field(default_factory=Usage)
    read_fingerprint: Callable[[], str | None] = lambda: None
    times: Callable[[], AnswerTimes] = AnswerTimes
    now: Callable[[], float] | None = None

    @property
    def system_fingerprint(self) -> str | None:
        return self.read_fingerprint()

    def fields(self, id_prefix: str, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{id_prefix}{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


PromptInfo = RequestOutput | OutputProcessor
"""A prompt, and what is known of it: of a request that has ended, or of one that runs."""


class AnswerEncoder(ABC):
    """Makes the bytes of one answer; the usage already counts the outputs that it is given."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """For a call that is not streamed. On any thread. Raises ApiError if it was cancelled."""

    def close(self) -> None:  # noqa: B027  most answers leave nothing
        """The call has ended, perhaps before its answer."""


class WholeAnswer(AnswerEncoder):
    """Made by one function."""

    def __init__(
        self, head: AnswerHead, make: Callable[[AnswerHead, Sequence[RequestOutput]], bytes]
    ) -> None:
        super().__init__(head)
        self._make = make

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._make(self.head, outputs)


class StreamEncoder(AnswerEncoder):
    """Also makes the events of a stream."""

    def opening(self) -> bytes:
        """The events that a stream begins with, before there is any token."""
        return b""

    @abstractmethod
    def take(self, place: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        """The events of new outputs of the prompt at `place` in the call."""

    def silence(self) -> bytes:
        """Sent after a silence, so that no proxy closes the connection."""
        return KEEP_ALIVE

    @abstractmethod
    def closing(self) -> bytes:
        """The events that a stream ends with."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The events that a failed stream ends with."""


class ChunkEncoder(StreamEncoder):
    """OpenAI's (chat) completions. A choice's parts are requested in order; joined, they are the
    whole choice."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, head: AnswerHead, body: GenerationBody, num_prompts: int = 1) -> None:
        super().__init__(head)
        asked = body.stream_options or StreamOptions({})
        self._n, self._num_choices = body.n, num_prompts * body.n
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

    def take(self, place: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        made: list[bytes] = []
        if not self._is_before_fixed and self.head.system_fingerprint is not None:
            self._before, self._is_before_fixed = self._make_before(), True
        for output in outputs:
            part = self.part(place * self._n + output.index, output, request)
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


def schema_mark(output: CompletionOutput) -> dict[str, bool]:
    """The member of an answer that was checked by its schema at its end."""
    found = output.is_schema_valid
    return {} if found is None else {"x_schema_valid": found}


def _add_end(choice: ChoiceObject, output: CompletionOutput) -> None:
    if output.receipt is not None:
        choice["receipt"] = output.receipt
    choice |= schema_mark(output)
