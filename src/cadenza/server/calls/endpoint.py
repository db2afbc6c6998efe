"""What an endpoint that calls the engine gives: a checked body (`CallRequest`) and the bytes of its
answer (`AnswerEncoder`; `BlockEncoder` where an answer is a list of blocks). Invariants: a
`CallRequest` that was read can be served, unless its prompt is too long or its tokens unknown; a
stream's events, joined, are the whole answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.prepared_request import AnyPrompt, PreparedRequest, RequestOptions, Terms
from cadenza.frontend.receipts import ReceiptSeal
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, OutputPart, PartKind, RequestOutput
from cadenza.request import SamplingParams, show
from cadenza.server.calls.conversation import new_call_id
from cadenza.server.calls.record import AnswerTimes, Usage
from cadenza.server.errors import ApiError, invalid_value
from cadenza.server.fields.body import UnknownFields
from cadenza.server.fields.sampling import CallBody, SamplingField
from cadenza.server.fields.tools import tool_use
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import AnswerSchema, ApiRoute
from cadenza.server.response_store import ResponseStore
from cadenza.server.served_model import ServedModel
from cadenza.structured import StructuredOutput

GENERATION_STATUSES = (400, 413, 415, 404, 429, 500, 503, 504)
KEEP_ALIVE = b": keep-alive\n\n"  # a comment
LEAST_LOGPROB = -9999.0  # JSON has no infinity

LogprobEntry = Mapping[int, Logprob]  # the chosen token of a position, first, and the likeliest

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before it begins."""

    request_id: str
    created: int
    model: str
    text: TextFrontend  # the model's
    usage: Usage = field(default_factory=Usage)  # of the answer so far, as its times
    read_fingerprint: Callable[[], str | None] = lambda: None  # None until it is known
    times: Callable[[], AnswerTimes] = AnswerTimes
    # seconds since 1970, for the time of a chunk; None: `created` is that of all
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
    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        """The events of new outputs of a prompt, by its index in the call."""

    def silence(self) -> bytes:
        """Sent after a silence, so that no proxy closes the connection."""
        return KEEP_ALIVE

    @abstractmethod
    def closing(self) -> bytes:
        """The events that a stream ends with."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The events that a failed stream ends with."""


def schema_mark(output: CompletionOutput) -> dict[str, bool]:
    """The member of an answer that was checked by its schema at its end."""
    found = output.is_schema_valid
    return {} if found is None else {"x_schema_valid": found}


@dataclass(slots=True, eq=False)
class Block:
    """One block; the text of a call is its arguments."""

    index: int  # in the answer
    kind: PartKind
    name: str | None = None  # the function that is called
    call_id: str = ""  # of a call
    is_ended: bool = False
    texts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object; a text that is no JSON object is its only member."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except msgspec.DecodeError:
            return {"arguments": self.text}


class BlockEvent(NamedTuple):
    """A block begins, has more text, or ends."""

    kind: Literal["begin", "text", "end"]
    block: Block
    text: str = ""


class BlockReader:
    """Reads one sample's outputs as they come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.mark: dict[str, bool] = {}

    def take(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        """The events of an output; its end ends the last block."""
        parts = output.parts
        if parts is None:
            parts = (OutputPart("content", output.text),)
        for part in parts:
            if part.text or part.name is not None:
                yield from self._take_part(part)
        if output.finish_reason is not None:
            self.mark = schema_mark(output)
            yield from self._end()

    def _take_part(self, part: OutputPart) -> Iterator[BlockEvent]:
        if not self.blocks or self.blocks[-1].is_ended or self.blocks[-1].kind != part.kind:
            yield from self._end()
            yield self._begin(part)
        block = self.blocks[-1]
        block.texts.append(part.text)
        yield BlockEvent("text", block, part.text)
        if part.name is not None:
            yield from self._end()

    def _begin(self, part: OutputPart) -> BlockEvent:
        call_id = "" if part.name is None else new_call_id()
        block = Block(len(self.blocks), part.kind, name=part.name, call_id=call_id)
        self.blocks.append(block)
        return BlockEvent("begin", block)

    def _end(self) -> Iterator[BlockEvent]:
        if self.blocks and not self.blocks[-1].is_ended:
            self.blocks[-1].is_ended = True
            yield BlockEvent("end", self.blocks[-1])


class BlockEncoder(StreamEncoder):
    """Of one prompt; its events follow from those of its blocks."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._reader = BlockReader()
        self.ended: CompletionOutput | None = None

    @abstractmethod
    def _whole_object(self) -> dict[str, Any]:
        """The answer, made of all blocks."""

    def _events_of(self, event: BlockEvent) -> Iterable[bytes]:
        raise NotImplementedError

    def _events(self, output: CompletionOutput) -> Iterable[bytes]:
        return [made for event in self._read(output) for made in self._events_of(event)]

    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        del prompt, request  # there is one prompt, which the answer does not contain
        return b"".join([made for output in outputs for made in self._events(output)])

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        for request in outputs:
            for output in request.outputs:
                for _ in self._read(output):
                    pass
        return msgspec.json.encode(self._whole_object())

    def _read(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        if output.finish_reason is not None:
            self.ended = output
        yield from self._reader.take(output)


def event_bytes(name: str, members: dict[str, Any]) -> bytes:
    """A named event, whose data repeats its name."""
    body = msgspec.json.encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def ranked(entry: LogprobEntry, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a position, the likeliest first."""
    found = [each for each in entry.items() if each[1].rank is not None]
    return sorted(found, key=lambda each: each[1].rank or 0)[:num_top]


def shown_token(token_id: int, found: Logprob) -> str:
    return token_name(token_id) if found.decoded_token is None else found.decoded_token


def token_name(token_id: int) -> str:
    """Unique, unlike the token's text."""
    return f"token_id:{token_id}"


def finite(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a call may depend on besides its body."""

    tenant: str
    request_id: str
    responses: ResponseStore  # the stored ones, of all tenants
    seal: ReceiptSeal  # of this server's receipts
    model: ServedModel  # it may not be loaded yet


class CallRequest(CallBody, ABC):
    """A checked body: its prompts, its parameters, and the form of the answer."""

    prompt_field: ClassVar[str]  # the name of the field with the prompt, for errors
    param_names: ClassVar[Mapping[str, str]] = {}
    """This body's names of the fields that an error of a request names, where they differ."""

    stream: Any = False  # whether the answer is sent as it comes

    @property
    def user_label(self) -> str | None:
        """Who asks, for the log's line."""
        return self.values.get("user")

    @property
    def form_field(self) -> str | None:
        return None

    @cached_property
    def use(self) -> ToolUse | None:
        """The tools that the answer may call. Raises ApiError (400)."""
        get = self.values.get
        is_parallel = get("parallel_tool_calls", True)
        return tool_use(get("tools"), get("tool_choice"), is_parallel=is_parallel)

    @property
    def has_form(self) -> bool:
        """Whether `prepare` checks a form of the answer, or of calls in it, which may take long."""
        return self.form_field is not None or self.use is not None

    def check_together(self, limits: ServerLimits) -> None:
        """Raises ApiError (400) where the fields do not go together, or beyond the limits."""

    def enter(self, context: CallContext) -> None:
        """Takes what the call depends on besides its body; it counts in `num_bytes`. Raises
        ApiError (400)."""

    def check_size(self, hidden_size: int | None) -> None:
        """Raises ApiError (400) for a too large answer; `hidden_size`: of embeddings."""

    def immediate(self, head: AnswerHead) -> bytes | None:
        """The whole answer, where it needs no engine but a ready one; None where it does."""
        del head

    def request_options(self, text: TextFrontend) -> RequestOptions:
        """Raises ApiError (400)."""
        del text
        get = self.values.get
        return RequestOptions(
            has_receipt=bool(get("receipt")),
            prediction=get("prediction", ""),
            add_special_tokens=get("add_special_tokens", True),
        )

    @abstractmethod
    def sampling(self, text: TextFrontend) -> SamplingParams:
        """The sampling parameters; unset ones are the checkpoint's recommendations. Raises
        InvalidRequestError: the values do not go together."""

    @abstractmethod
    def prompts(self, text: TextFrontend) -> Sequence[AnyPrompt]:
        """Slow; safe on any thread. Raises CadenzaError, ApiError (400) and ImagesToFetch."""

    def prepare(self, text: TextFrontend, terms: Terms) -> list[PreparedRequest]:
        """A request of each prompt. Slow; safe on any thread. Raises as `prompts` does."""
        params, options = self.sampling(text), self.request_options(text)
        return [text.prepare(each, params, options, terms) for each in self.prompts(text)]

    def encoder(self, head: AnswerHead) -> AnswerEncoder:
        return WholeAnswer(head, self.whole_answer)

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        """For calls without an encoder of their own. Raises ApiError."""
        raise NotImplementedError

    def param_of(self, param: str | None) -> str | None:
        """This body's name of the field that an error of a request names."""
        if param == "structured":
            return self.form_field or "tools"
        if param == "prompt":
            return self.prompt_field
        return self.param_names.get(param or "", param)


class GenerationRequest(CallRequest):
    """A call that generates, whose answer may be streamed."""

    default_max_tokens: ClassVar[int | None] = None  # None: the rest of the context

    @abstractmethod
    def encoder(self, head: AnswerHead) -> StreamEncoder: ...

    @property
    def form(self) -> StructuredOutput | None:
        """The form of the answer that is asked for."""
        return None

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None: no log probabilities."""
        return None

    @property
    def own_sampling(self) -> Mapping[str, Any]:
        """Parameters that are no fields by themselves; they take precedence."""
        return {}

    def sampling(self, text: TextFrontend) -> SamplingParams:
        named = ((self.fields[name], value) for name, value in self.values.items())
        asked: dict[str, Any] = {
            "max_tokens": self.default_max_tokens,
            "structured": self.form,
            "logprobs": self.num_top_logprobs,
            **{each.sets: value for each, value in named if isinstance(each, SamplingField)},
            **self.own_sampling,
        }
        return text.defaults.complete(asked)


def check_stream_options(options: object, stream: bool) -> None:
    """Raises ApiError (400) for options of a stream where there is none."""
    if options is not None and not stream:
        raise invalid_value("stream_options are for streams; set stream, too", "stream_options")


def check_num_logprobs(name: str, number: int, limits: ServerLimits) -> None:
    """Raises ApiError (400) where a field asks for more than this server gives."""
    if number > limits.max_logprobs:
        raise invalid_value(
            f"{name} is {show(number)}; this server gives at most {limits.max_logprobs} "
            f"(--max-logprobs)",
            name,
        )


@dataclass(frozen=True, slots=True)
class GeneratingEndpoint:
    """One endpoint that calls the engine, and the type of its requests. `statuses`: of its answers
    besides 200."""

    name: str
    path: str
    summary: str
    request_type: type[CallRequest]
    answers: AnswerSchema
    statuses: tuple[int, ...] = GENERATION_STATUSES
    can_stream: bool = True

    @property
    def route(self) -> ApiRoute:
        return ApiRoute(
            *(self.name, "POST", self.path, self.summary, self.answers),
            statuses=self.statuses,
            body=self.request_type,
            can_stream=self.can_stream,
        )

    def read(
        self, body: bytes, limits: ServerLimits, unknown: UnknownFields = "suggest"
    ) -> CallRequest:
        """Raises ApiError (400) naming the field at fault."""
        request = self.request_type.read(body, unknown)
        request.check_together(limits)
        return request
