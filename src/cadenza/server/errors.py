"""Error answers: `ApiError`; those with fixed messages are rows of a table. Invariant: a message
depends on the error's code only; it holds no path, and no exception's text except that of errors
for clients (`InvalidRequestError`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from cadenza.engine.batch_engine import EngineState, ServedEngine
from cadenza.errors import (
    CadenzaError,
    ContextLengthError,
    EngineClosedError,
    EngineUnavailableError,
    FormNotCheckedError,
    InvalidRequestError,
    QueueFullError,
)
from cadenza.outputs import CompletionOutput

RETRY_QUEUE_S = 1
RETRY_LOADING_S = 5

Headers = tuple[tuple[str, str], ...]

ParamOf = Callable[[str | None], str | None]
"""The name in an endpoint's body of what an error names."""

UNAVAILABLE_CODES: dict[EngineState, str] = {
    "loading": "loading",
    "draining": "draining",
    "restarting": "engine_restarting",
    "dead": "engine_dead",
}


class ErrorStatus(NamedTuple):
    """What all errors with a status share; `summary` is for the API's description."""

    type: str
    summary: str


_INVALID, _LIMITED, _FAILED = "invalid_request_error", "rate_limit_error", "server_error"

STATUSES: Mapping[int, ErrorStatus] = {
    400: ErrorStatus(_INVALID, "The request is not valid."),
    401: ErrorStatus(_INVALID, "No valid API key."),
    404: ErrorStatus(_INVALID, "There is no such thing."),
    405: ErrorStatus(_INVALID, "Another method is needed."),
    413: ErrorStatus(_INVALID, "The body is too large."),
    415: ErrorStatus(_INVALID, "The body is not JSON."),
    429: ErrorStatus(_LIMITED, "The queue is full: retry here."),
    500: ErrorStatus(_FAILED, "The server failed."),
    503: ErrorStatus(_FAILED, "Not serving now: retry elsewhere."),
    504: ErrorStatus(_FAILED, "The deadline has passed."),
    529: ErrorStatus(_FAILED, "Not serving now: retry elsewhere."),
}


class ApiError(Exception):
    """An error answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers
        self.details: Mapping[str, Any] | None = None
        """Structured details, in APIs whose errors have a member for them."""
        self.in_anthropic: str | None = None
        """The words of Anthropic's API, which its clients match; they precede the message there."""

    @property
    def with_field(self) -> str:
        """The message, for APIs whose errors have no member for the field at fault."""
        if self.in_anthropic is not None:
            return f"{self.in_anthropic}. {self.message}"
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param}: {self.message}"

    def body(self) -> bytes:
        return msgspec.json.encode(self.as_object())

    def as_object(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": STATUSES[self.status].type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid_value(message: str, param: str | None) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def invalid_json(reason: str, *, at_place: bool = False) -> ApiError:
    """`at_place`: the reason says what is needed where."""
    advice = "" if at_place else "; send one JSON object"
    return ApiError(400, "invalid_json", f"the body {reason}{advice}")


def unknown_field(name: str, known: list[str], meant: str | None = None) -> ApiError:
    """`meant`: the field of which the name may be a misspelling."""
    advice = f"there are {', '.join(known)}" if meant is None else f"did you mean {meant}?"
    message = f"there is no field {name!r} here; {advice}"
    # Half a surrogate pair cannot be encoded.
    whole = name.encode(errors="backslashreplace").decode()
    return ApiError(400, "unknown_field", message, param=whole)


def not_built(
    name: str, what: str, harmless: Sequence[object] = (), advice: str = "leave the field out"
) -> ApiError:
    """`harmless` are the JSON values that are accepted, because they do not use the feature."""
    if harmless:
        shown = " or ".join(msgspec.json.encode(value).decode() for value in harmless)
        advice = f"{advice} or send {shown}"
    message = f"{name}: {what} is not built yet in this server; {advice}"
    return ApiError(400, "unsupported_field", message, param=name)


def beyond_context(field: str, length: str, max_model_len: int) -> ApiError:
    """More tokens than a context holds, where none are generated; `length` is in words."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens; {field} has {length}: "
        f"send it in parts"
    )
    return ApiError(400, "context_length_exceeded", message, param=field)


@dataclass(frozen=True, slots=True)
class ErrorTemplate:
    """Makes an error of one code when called; `message` and header values are formats of the
    arguments."""

    status: int
    code: str
    message: str
    headers: Headers = ()
    param: str | None = None

    def __call__(self, **values: object) -> ApiError:
        headers = tuple((name, value.format_map(values)) for name, value in self.headers)
        message = self.message.format_map(values)
        return ApiError(self.status, self.code, message, param=self.param, headers=headers)


CLOSING: Headers = (("connection", "close"),)
_NO_RETRY: Headers = (("x-should-retry", "false"),)
_RETRY: Headers = (("retry-after", str(RETRY_QUEUE_S)),)
_RETRY_LATER: Headers = (("retry-after", "{seconds}"),)

invalid_http = ErrorTemplate(400, "invalid_http", "{message}", CLOSING)
invalid_host = ErrorTemplate(
    400,
    "invalid_host",
    "the Host header is {name}: a server at a loopback address without an API key answers to "
    "localhost, IP addresses and the names of --allowed-hosts, so that no web page can reach it "
    "under a name of its own; call it by one of those, or start it with a key",
)
invalid_api_key = ErrorTemplate(
    401,
    "invalid_api_key",
    "a valid API key is needed; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
    (("www-authenticate", 'Bearer realm="cadenza"'),),
)
model_not_found = ErrorTemplate(
    404,
    "model_not_found",
    "there is no model {model!r} here; this server has {listed}: ask for that, or start it with "
    "--served-model-name and the name that clients use, or with --served-model-name '*' for any",
    param="model",
)
request_not_found = ErrorTemplate(
    404, "request_not_found", "no request with this id is open", param="id"
)
unknown_url = ErrorTemplate(404, "unknown_url", "there is nothing at {method} {path}; {advice}")
method_not_allowed = ErrorTemplate(
    405,
    "method_not_allowed",
    "{method} does not work here; {listed} does",
    (("allow", "{listed}"),),
)
content_too_large = ErrorTemplate(
    413, "content_too_large", "the body has over {limit}, the most that is read; send less", CLOSING
)
unsupported_media_type = ErrorTemplate(
    415,
    "unsupported_media_type",
    "the body's type must be application/json; set the content-type header",
)
unsupported_encoding = ErrorTemplate(
    415,
    "unsupported_media_type",
    "the body's {header} is {coding!r}; only plain JSON is read: send the body uncompressed",
    (("accept-encoding", "identity"),),
)
queue_full = ErrorTemplate(429, "queue_full", "{message}", _RETRY)
queue_too_long = ErrorTemplate(429, "queue_full", "{message}", _RETRY_LATER)
rate_limited = ErrorTemplate(
    429,
    "rate_limit_exceeded",
    "your key's {rate} is used up; try again in {seconds} {unit}",
    _RETRY_LATER,
)
bodies_full = ErrorTemplate(
    429,
    "bodies_full",
    "{limit} of bodies are being read, the most that --max-bodies-bytes allows; try again when "
    "some have been",
    _RETRY,
)
connections_full = ErrorTemplate(
    429,
    "connections_full",
    "as many connections have requests in progress as this server has file descriptors for; try "
    "again when some have finished",
    _RETRY,
)
model_failed = ErrorTemplate(
    503,
    "model_failed",
    "the model {name} could not be loaded: {reason}; it is tried again in {seconds} seconds at the "
    "earliest, other models are served meanwhile",
    _RETRY_LATER,
)
models_full = ErrorTemplate(
    503,
    "loading",
    "the model {name} is not loaded, and {num_waiting} requests wait for models already, as many "
    "as --max-num-queued-reqs and --max-bodies-bytes allow; try again soon",
    _RETRY_LATER,
)
form_not_checked = ErrorTemplate(503, "form_not_checked", "{message}", _RETRY)
"""The machine is the cause, so the request may be retried."""
cancelled = ErrorTemplate(400, "cancelled", "the request was cancelled, so that it has no answer")
"""The end of a call whose answer is nothing if it is not whole."""
step_failed = ErrorTemplate(
    500, "step_failed", "the computation failed; the server's log has the cause"
)
"""The cause may be the machine, so the request may be retried."""
engine_failed = ErrorTemplate(
    500,
    "engine_failed",
    "the engine failed each time that it computed this request, the last time with no other; do "
    "not send it again",
    _NO_RETRY,
)
queue_timeout = ErrorTemplate(
    504,
    "deadline_exceeded",
    "the request was not started in time: --queue-timeout allows {queue_s:g} seconds in the queue, "
    "and --request-timeout {total_s:g} for all of it; try again later",
)
request_timeout = ErrorTemplate(
    504,
    "deadline_exceeded",
    "the request took {seconds:g} seconds and was not finished; --request-timeout allows no more: "
    "ask for less, or try again later",
)


def bounds_exceeded(code: str, message: str) -> ApiError:
    """A request line, a head or a body beyond its bound; the connection is closed."""
    return ApiError(400, code, message, headers=CLOSING)


def response_not_found(response_id: str, param: str | None = None) -> ApiError:
    """`param`: the field of a body that names it; None: it is the URL that does."""
    if param is None:
        status, code = 404, "response_not_found"
    else:
        status, code = 400, "previous_response_not_found"
    message = (
        f"there is no response {response_id[:80]!r} here that is stored whole: it was not stored, "
        f"has been deleted, or was not used for --stored-responses-ttl seconds, or has not ended"
    )
    return ApiError(status, code, message, param=param or "id")


def server_error(message: str = "the server failed on this request") -> ApiError:
    """The request is assumed to be the cause, so that a retry would fail again."""
    return ApiError(500, "server_error", message, headers=_NO_RETRY)


_UNAVAILABLE = {
    "loading": "the model is being loaded; try again soon",
    "unloaded": "the model is not loaded; a request for it loads it",
    "draining": "the server is shutting down; try another one",
    "engine_restarting": "the engine is being restarted; try again soon, or another server",
    "engine_busy": "it does not tell what it does; try again soon",
    "engine_dead": "the engine is down and needs its operator; try another server",
}


def unavailable(
    code: str, retry_after_s: float | None = None, cause: str | None = None
) -> ApiError:
    """Raises KeyError for a code that is not in the table above."""
    seconds = RETRY_LOADING_S if retry_after_s is None else max(1, math.ceil(retry_after_s))
    headers = (("retry-after", str(seconds)),)
    message = _UNAVAILABLE[code] if cause is None else f"{cause}; {_UNAVAILABLE[code]}"
    return ApiError(503, code, message, headers=headers)


def same_param(param: str | None) -> str | None:
    return param


def error_of(error: CadenzaError, state: EngineState, param_of: ParamOf = same_param) -> ApiError:
    """The answer to a request that was refused. `state`: the engine's. `param_of`: the name in the
    endpoint's body of what the error names."""
    if isinstance(error, InvalidRequestError):
        param = param_of(error.param)
        if not isinstance(error, ContextLengthError):
            return invalid_value(str(error), param)
        found = ApiError(400, "context_length_exceeded", str(error), param=param)
        if error.is_prompt_alone:
            most = error.most_prompt_tokens
            found.in_anthropic = f"prompt is too long: {error.prompt_length} > {most} maximum"
        return found
    if isinstance(error, QueueFullError):
        return queue_error(error)
    if isinstance(error, FormNotCheckedError):
        return form_not_checked(message=error)
    if isinstance(error, EngineUnavailableError | EngineClosedError):
        return unavailable(UNAVAILABLE_CODES.get(state, "draining"))
    return server_error()


def queue_error(error: QueueFullError) -> ApiError:
    if error.retry_after_s is None:
        return queue_full(message=error)
    return queue_too_long(message=error, seconds=max(1, math.ceil(error.retry_after_s)))


_REMEDIES = {
    "allowed_token_ids": "add tokens to {}",
    "bad_words": "leave out some of {}",
    "min_tokens": "lower {}",
    "structured": "widen what {} asks for",
    "thinking_token_budget": "raise the budget of {}",
}


def none_allowed(fields: Sequence[str], param_of: ParamOf = same_param) -> ApiError:
    """No token may follow; `fields` are those in force, by the names of `SamplingParams`."""
    named = {name: param_of(name) or name for name in fields}
    if not named:
        return invalid_value("no token may follow: the request rules out every one", None)
    together = " together" if len(named) > 1 else ""
    rules = "rule" if len(named) > 1 else "rules"
    remedies = " or ".join(_REMEDIES[name].format(shown) for name, shown in named.items())
    return invalid_value(
        f"no token may follow: {' and '.join(named.values())}{together} {rules} out every one; "
        f"{remedies}",
        next(iter(named.values())),
    )


def error_of_end(
    failed: CompletionOutput, monitor: ServedEngine, param_of: ParamOf = same_param
) -> ApiError:
    match failed.error_kind:
        case "queue_timeout":
            return queue_timeout(queue_s=monitor.timeouts.queue_s, total_s=monitor.timeouts.total_s)
        case "request_timeout":
            return request_timeout(seconds=monitor.timeouts.total_s)
        case "none_allowed":
            return none_allowed(failed.error_fields, param_of)
        case "constraint_failed":
            param = param_of("structured")
            return invalid_value(
                f"{param}: what it asks for is too complex to be followed any further; simplify it",
                param,
            )
        case "step_failed":
            return step_failed()
        case "text_failed":
            return server_error("the text of this answer could not be made")
        case "engine_failed":
            return engine_failed()
        case "engine_closed":
            return unavailable("draining")
        case "engine_lost":
            is_dead = monitor.status().state == "dead"
            return unavailable("engine_dead" if is_dead else "engine_restarting")
        case _:
            return server_error("the model's numbers broke down on this request")
