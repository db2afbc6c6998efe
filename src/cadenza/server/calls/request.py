"""The interface of endpoints that call the engine (`GeneratingEndpoint`, `CallRequest`), shared
rules between fields (`ChoicesRequest`), and log probabilities' forms. Invariant: a `CallRequest`
that was read can be served, unless its prompt is too long or its tokens unknown."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cadenza.engine.batch_engine import ServedEngine
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import ToolUse
from cadenza.frontend.prepared_request import (
    PLAIN,
    AnyPrompt,
    PreparedRequest,
    RequestOptions,
    Terms,
)
from cadenza.frontend.receipts import ReceiptSeal
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import Logprob, RequestOutput
from cadenza.request import SamplingParams, show
from cadenza.server.calls.encoder import (
    AnswerEncoder,
    AnswerHead,
    PromptInfo,
    StreamEncoder,
    WholeAnswer,
)
from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import Field
from cadenza.server.fields.sampling import (
    MAX_CHOICES,
    CallBody,
    GenerationBody,
    SamplingField,
)
from cadenza.server.fields.structured import form_field
from cadenza.server.fields.tools import tool_use
from cadenza.server.fields.types import Schema, or_null
from cadenza.server.fields.unknown_members import UnknownFields
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import (
    COUNT,
    TEXT,
    AnswerSchema,
    ApiRoute,
    list_of,
    object_of,
    one_of,
)
from cadenza.server.response_store import ResponseStore
from cadenza.structured import StructuredOutput

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""

LogprobEntry = Mapping[int, Logprob]
"""The chosen token of a position, first, and the likeliest."""

GENERATION_STATUSES = (400, 413, 415, 404, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a call may depend on besides its body. `responses`: the stored ones, of all tenants.
    `seal`: of this server's receipts. `engine`: the model's, and `fingerprint` that of its answers,
    once the model is loaded."""

    tenant: str
    request_id: str
    responses: ResponseStore
    seal: ReceiptSeal
    engine: Callable[[], ServedEngine]
    fingerprint: Callable[[], Fingerprint | None]


class CallRequest(CallBody, ABC):
    """A checked body: its prompts, its parameters, and the form of the answer."""

    prompt_field: ClassVar[str]
    """The name of the field with the prompt, for errors."""
    param_names: ClassVar[Mapping[str, str]] = {}
    """This body's names of the fields that an error of a request names, where they differ."""

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def user_label(self) -> str | None:
        """Who asks, for the log's line."""
        return self.values.get("user")

    @property
    def request_options(self) -> RequestOptions:
        return PLAIN

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

    @abstractmethod
    def sampling(self, text: TextFrontend) -> SamplingParams:
        """The sampling parameters; unset ones are the checkpoint's recommendations. Raises
        InvalidRequestError: the values do not go together."""

    @abstractmethod
    def prompts(self, text: TextFrontend) -> Sequence[AnyPrompt]:
        """Slow; safe on any thread. Raises CadenzaError, ApiError (400) and ImagesToFetch."""

    def prepare(self, text: TextFrontend, terms: Terms) -> list[PreparedRequest]:
        """A request of each prompt. Slow; safe on any thread. Raises as `prompts` does."""
        params, options = self.sampling(text), self.request_options
        return [text.prepare(each, params, options, terms) for each in self.prompts(text)]

    def encoder(self, head: AnswerHead) -> AnswerEncoder:
        return WholeAnswer(head, self.whole_answer)

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        """For calls without an encoder of their own. Raises ApiError."""
        raise NotImplementedError

    @property
    def is_streamed(self) -> bool:
        return False

    def param_of(self, param: str | None) -> str | None:
        """This body's name of the field that an error of a request names."""
        if param == "structured":
            return self.form_field or "tools"
        if param == "prompt":
            return self.prompt_field
        return self.param_names.get(param or "", param)


class GenerationRequest(CallRequest):
    """A call that generates, whose answer may be streamed."""

    stream: Field[bool]
    default_max_tokens: ClassVar[int | None] = None
    """None: the rest of the context."""

    @abstractmethod
    def encoder(self, head: AnswerHead) -> StreamEncoder: ...

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def form(self) -> StructuredOutput | None:
        """The form of the answer that is asked for."""
        return None

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None: no log probabilities."""
        return None

    def sampling(self, text: TextFrontend) -> SamplingParams:
        return text.defaults.complete(self.sampling_values())

    def sampling_values(self) -> dict[str, Any]:
        found: dict[str, Any] = {"max_tokens": self.default_max_tokens}
        for name, value in self.values.items():
            field = self.fields[name]
            if isinstance(field, SamplingField):
                found[field.sets] = value
        if self.form is not None:
            found["structured"] = self.form
        if self.num_top_logprobs is not None:
            found["logprobs"] = self.num_top_logprobs
        return found


class ChoicesRequest(GenerationBody, GenerationRequest):
    """A body of an endpoint whose answers are choices, as completions and chat completions are."""

    def check_fields(self) -> None:
        """Checks the endpoint's own fields together. Raises ApiError (400)."""

    @property
    def request_options(self) -> RequestOptions:
        return RequestOptions(has_receipt=bool(self.receipt))

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
            name=self.name,
            method="POST",
            path=self.path,
            policy="key",
            summary=self.summary,
            answers=self.answers,
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
