"""Bytes of generated answers: whole JSON objects, and server-sent events (SSE) in chunks.

Owns what is around the choices: ids, times, usage. Invariant: a stream is role or text chunks, one
finish reason for each choice, usage if asked for, and `[DONE]`, whatever happens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.errors import ApiError
from cadenza.server.request_log import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.encode

ChoiceObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    request_id: str
    created: int
    model: str

    def fields(self, id_prefix: str, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{id_prefix}{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            # Null until it names all that decides an answer's tokens.
            "system_fingerprint": None,
        }


class AnswerEncoder(Protocol):
    """Makes one answer's bytes, whole or as the events of a stream; told of news in order.

    `usage` has counted what it is told of.
    """

    usage: Usage

    def opening(self) -> bytes:
        """What a stream begins with, at once."""
        ...

    def take(self, prompt: int, news: RequestOutput) -> bytes:
        """Events of what is new of a prompt."""
        ...

    def closing(self) -> bytes:
        """What a stream ends with."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with that has failed."""
        ...

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        """The answer that is no stream."""
        ...


class Choices(Protocol):
    """Makes choices; one object for one answer, told of each choice's parts in order.

    Invariant: a whole choice is made by the same code as a stream's parts, so that the parts put
    together are the whole.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def opening(self, index: int) -> ChoiceObject | None:
        """A stream's first part of a choice, before there is any token."""
        ...

    def part(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject | None:
        """A stream's next part; None when there is nothing to show."""
        ...

    def whole(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject: ...

    def about_prompt(self, request: RequestOutput | None) -> dict[str, Any] | None:
        """What an answer or a chunk holds beside its choices; None where it is not all there yet.

        Without a request it is what chunks hold that tell nothing of the prompt.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """What a client asked for of the chunks.

    Args:
        n: choices of each prompt.
        include_usage: whether a last chunk tells it; `continuous_usage`: every other one, too.
    """

    num_prompts: int
    n: int
    include_usage: bool
    continuous_usage: bool


class ChunkEncoder:
    """An `AnswerEncoder` in the shapes of OpenAI's completions and chat completions."""

    def __init__(
        self, head: AnswerHead, usage: Usage, choices: Choices, options: ChunkOptions
    ) -> None:
        self.usage = usage
        self._options = options
        self._choices = choices
        self._head = head
        chunk = _encode(head.fields(choices.id_prefix, choices.chunk_name))
        self._before = b"data: " + chunk[:-1] + b',"choices":['
        self._is_prompt_told = False
        self._after = self._make_after(None)

    def opening(self) -> bytes:
        opened = map(self._choices.opening, range(self._options.num_prompts * self._options.n))
        return self._chunks(choice for choice in opened if choice is not None)

    def take(self, prompt: int, news: RequestOutput) -> bytes:
        parts: list[ChoiceObject] = []
        for output in news.outputs:
            index = prompt * self._options.n + output.index
            part = self._choices.part(index, output, news)
            if part is not None:
                parts.append(part)
        return self._chunks(parts, news)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        fields = self._head.fields(self._choices.id_prefix, self._choices.chunk_name)
        last: dict[str, Any] = {**fields, "choices": [], "usage": self.usage.as_object()}
        return b"data: " + _encode(last) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        choices: list[ChoiceObject] = []
        about_prompt: dict[str, Any] | None = None
        for prompt, request in enumerate(outputs):
            about_prompt = self._choices.about_prompt(request)
            for output in request.outputs:
                index = prompt * self._options.n + output.index
                choices.append(self._choices.whole(index, output, request))
        fields = self._head.fields(self._choices.id_prefix, self._choices.object_name)
        about_prompt = about_prompt or self._choices.about_prompt(None) or {}
        answer = {**fields, "choices": choices, "usage": self.usage.as_object(), **about_prompt}
        return _encode(answer)

    def _chunks(self, parts: Iterable[ChoiceObject], news: RequestOutput | None = None) -> bytes:
        """One chunk for each part; the first that can tells of the prompt."""
        made: list[bytes] = []
        for part in parts:
            about_prompt = self._untold(news)
            after = self._after
            if about_prompt is not None or self._options.continuous_usage:
                after = self._make_after(about_prompt)
            made += [self._before, _encode(part), after]
        return b"".join(made)

    def _make_after(self, about_prompt: dict[str, Any] | None) -> bytes:
        """What follows a chunk's choices."""
        rest: dict[str, Any] = {}
        if self._options.include_usage:
            rest["usage"] = self.usage.as_object() if self._options.continuous_usage else None
        rest |= about_prompt or self._choices.about_prompt(None) or {}
        return (b"]," + _encode(rest)[1:] if rest else b"]}") + b"\n\n"

    def _untold(self, news: RequestOutput | None) -> dict[str, Any] | None:
        """What is to be told of the prompt, once, as soon as it is known."""
        if news is None or self._is_prompt_told:
            return None
        found = self._choices.about_prompt(news)
        self._is_prompt_told = found is not None
        return found
