"""What an endpoint that calls the engine says of itself (`GeneratingEndpoint`), and a checked body
(`CallRequest`). Invariant: a `CallRequest` that was read can be served, unless its prompt is too
long or its tokens unknown."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.prepared_request import AnyPrompt, PreparedRequest, RequestOptions, Terms
from cadenza.frontend.receipts import ReceiptSeal
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import RequestOutput
from cadenza.request import SamplingParams, show
from cadenza.server.calls.encoder import AnswerEncoder, AnswerHead, StreamEncoder, WholeAnswer
from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import UnknownFields
from cadenza.server.fields.sampling import CallBody, SamplingField
from cadenza.server.fields.tools import tool_use
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import AnswerSchema, ApiRoute
from cadenza.server.response_store import ResponseStore
from cadenza.server.served_model import ServedModel
from cadenza.structured import StructuredOutput

GENERATION_STATUSES = (400, 413, 415, 404, 429, 500, 503, 504)


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
