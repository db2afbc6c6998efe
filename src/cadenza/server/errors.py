"""The server's error answers: `ApiError`, made by one function for each kind.

`error_of` and `error_of_end` map an error of the engine to one of them.

Owns status, type, code and headers of each. Invariant: a message depends on the error's kind only;
it holds no path, and no exception's text except that of errors written for clients
(`InvalidRequestError`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cadenza.engine.status import EngineMonitor, EngineState
from cadenza.errors import (
    CadenzaError,
    ContextLengthError,
    EngineClosedError,
    EngineUnavailableError,
    FormNotCheckedError,
    InvalidRequestError,
    QueueFullError,
    show_size,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """What all errors with a status share; `summary` is for the API's description."""

    status: int
    type: str
    summary: str


STATUSES: dict[int, ErrorStatus] = {
    each.status: each
    for each in (
        ErrorStatus(status=400, type="invalid_request_error", summary="The request is not valid."),
        ErrorStatus(status=401, type="invalid_request_error", summary="No valid API key."),
        ErrorStatus(status=404, type="invalid_request_error", summary="There is no such thing."),
        ErrorStatus(status=405, type="invalid_request_error", summary="Another method is needed."),
        ErrorStatus(status=413, type="invalid_request_error", summary="The body is too large."),
        ErrorStatus(status=415, type="invalid_request_error", summary="The body is not JSON."),
        ErrorStatus(status=429, type="rate_limit_error", summary="The queue is full: retry here."),
        ErrorStatus(status=500, type="server_error", summary="The server failed."),
        ErrorStatus(status=503, type="server_error", summary="Not serving now: retry elsewhere."),
        ErrorStatus(status=504, type="server_error", summary="The deadline has passed."),
        ErrorStatus(status=529, type="server_error", summary="Not serving now: retry elsewhere."),
    )
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
        self._status = STATUSES[status]
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers
        self.details: Mapping[str, Any] | None = None
        """For programs, in APIs whose errors have room for them."""
        self.in_anthropic: str | None = None
        """How Anthropic's API says it, which its clients read; it is said first there."""

    @property
    def status(self) -> int:
        return self._status.status

    def body(self) -> bytes:
        """The JSON of the answer, or of a stream's error frame."""
        return msgspec.json.encode(self.as_object())

    def as_object(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self._status.type,
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
    whole = name.encode(
        errors="backslashreplace"
    ).decode()  # half a surrogate pair cannot be encoded
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


def context_length_exceeded(error: ContextLengthError, param: str | None) -> ApiError:
    found = ApiError(400, "context_length_exceeded", str(error), param=param)
    if error.is_prompt_alone:
        most = error.most_prompt_tokens
        found.in_anthropic = f"prompt is too long: {error.prompt_length} > {most} maximum"
    return found


def beyond_context(field: str, length: str, max_model_len: int) -> ApiError:
    """More tokens than a context holds, where none are generated; `length` is in words."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens; {field} has {length}: "
        f"send it in parts"
    )
    return ApiError(400, "context_length_exceeded", message, param=field)


def bounds_exceeded(code: str, message: str) -> ApiError:
    """A request line or a head beyond its bound; the connection is closed."""
    return ApiError(400, code, message, headers=(("connection", "close"),))


def invalid_http(message: str) -> ApiError:
    """The bytes are no HTTP request; the connection is closed."""
    return ApiError(400, "invalid_http", message, headers=(("connection", "close"),))


def invalid_api_key() -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        "a valid API key is needed; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        headers=(("www-authenticate", 'Bearer realm="cadenza"'),),
    )


def model_not_found(model: str, served: tuple[str, ...]) -> ApiError:
    listed = ", ".join(served)
    message = (
        f"there is no model {model!r} here; this server has {listed}: ask for that, or start it "
        f"with --served-model-name and the name that clients use"
    )
    return ApiError(404, "model_not_found", message, param="model")


def request_not_found() -> ApiError:
    return ApiError(404, "request_not_found", "no request with this id is open", param="id")


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


def unknown_url(method: str, path: str, advice: str | None = None) -> ApiError:
    """`advice`: on the client's base URL, where the path tells that it is not the right one."""
    described = advice or "GET /openapi.json has what is"
    return ApiError(404, "unknown_url", f"there is nothing at {method} {path}; {described}")


def method_not_allowed(method: str, allowed: tuple[str, ...]) -> ApiError:
    listed = ", ".join(allowed)
    return ApiError(
        405,
        "method_not_allowed",
        f"{method} does not work here; {listed} does",
        headers=(("allow", listed),),
    )


def content_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        "content_too_large",
        f"the body has over {show_size(limit_bytes)}, the most that is read; send less",
        headers=(("connection", "close"),),
    )


def unsupported_media_type() -> ApiError:
    message = "the body's type must be application/json; set the content-type header"
    return ApiError(415, "unsupported_media_type", message)


def unsupported_encoding(header: str, coding: str) -> ApiError:
    message = (
        f"the body's {header} is {coding[:64]!r}; only plain JSON is read: send the body "
        f"uncompressed"
    )
    headers = (("accept-encoding", "identity"),)
    return ApiError(415, "unsupported_media_type", message, headers=headers)


def queue_full(message: str) -> ApiError:
    return ApiError(429, "queue_full", message, headers=(("retry-after", str(RETRY_QUEUE_S)),))


def rate_limited(what: str, retry_after_s: int) -> ApiError:
    """`what` names the rate of the tenant that is used up, with its number."""
    message = (
        f"your key's {what} is used up; try again in {retry_after_s} "
        f"second{'' if retry_after_s == 1 else 's'}"
    )
    headers = (("retry-after", str(retry_after_s)),)
    return ApiError(429, "rate_limit_exceeded", message, headers=headers)


def too_many_bodies(limit_bytes: int, *, has_length: bool) -> ApiError:
    """The rest of a body of known length is skipped; otherwise the connection is closed."""
    message = (
        f"{show_size(limit_bytes)} of bodies are being read, the most that --max-bodies-bytes "
        f"allows; try again when some have been"
    )
    headers = (("retry-after", str(RETRY_QUEUE_S)),)
    closing = () if has_length else (("connection", "close"),)
    return ApiError(429, "bodies_full", message, headers=(*headers, *closing))


def connections_full() -> ApiError:
    message = (
        "as many connections have requests in progress as this server has file descriptors for; "
        "try again when some have finished"
    )
    headers = (("retry-after", str(RETRY_QUEUE_S)),)
    return ApiError(429, "connections_full", message, headers=headers)


def server_error(message: str = "the server failed on this request") -> ApiError:
    """The request is assumed to be the cause, so that a retry would fail again."""
    return ApiError(500, "server_error", message, headers=(("x-should-retry", "false"),))


_UNAVAILABLE = {
    "loading": "the model is being loaded; try again soon",
    "draining": "the server is shutting down; try another one",
    "engine_restarting": "the engine is being restarted; try again soon, or another server",
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


def model_failed(name: str, reason: str, retry_after_s: float) -> ApiError:
    """Of several models this one could not be loaded; `reason` is in words for clients."""
    seconds = max(1, math.ceil(retry_after_s))
    message = (
        f"the model {name} could not be loaded: {reason}; it is tried again in {seconds} seconds "
        f"at the earliest, other models are served meanwhile"
    )
    return ApiError(503, "model_failed", message, headers=(("retry-after", str(seconds)),))


def models_full(name: str, num_waiting: int, load_s: float) -> ApiError:
    """No further request may wait for a model that is not loaded; `load_s` is how long that took
    the last time."""
    seconds = max(RETRY_LOADING_S, math.ceil(load_s))
    message = (
        f"the model {name} is not loaded, and {num_waiting} requests wait for models already, as "
        f"many as --max-num-queued-reqs and --max-bodies-bytes allow; try again soon"
    )
    return ApiError(503, "loading", message, headers=(("retry-after", str(seconds)),))


def form_not_checked(message: str) -> ApiError:
    """The machine is the cause, so the request may be retried."""
    headers = (("retry-after", str(RETRY_QUEUE_S)),)
    return ApiError(503, "form_not_checked", message, headers=headers)


def cancelled() -> ApiError:
    """The end of a call whose answer is nothing if it is not whole."""
    return ApiError(400, "cancelled", "the request was cancelled, so that it has no answer")


def step_failed() -> ApiError:
    """The cause may be the machine, so the request may be retried."""
    message = "the computation failed; the server's log has the cause"
    return ApiError(500, "step_failed", message)


def engine_failed() -> ApiError:
    """The request is the cause: the engine failed each time that it computed it, at last alone."""
    message = (
        "the engine failed each time that it computed this request, the last time with no other; "
        "do not send it again"
    )
    return ApiError(500, "engine_failed", message, headers=(("x-should-retry", "false"),))


def queue_timeout(seconds: float) -> ApiError:
    message = (
        f"the request waited {seconds:g} seconds in the queue and was not started; --queue-timeout "
        f"allows no more: try again later"
    )
    return ApiError(504, "deadline_exceeded", message)


def request_timeout(seconds: float) -> ApiError:
    message = (
        f"the request took {seconds:g} seconds and was not finished; --request-timeout allows no "
        f"more: ask for less, or try again later"
    )
    return ApiError(504, "deadline_exceeded", message)


def same_param(param: str | None) -> str | None:
    return param


def error_of(
    error: CadenzaError,
    state: EngineState,
    param_of: ParamOf = same_param,
) -> ApiError:
    """The answer to a request that was refused.

    Args:
        state: the engine's.
        param_of: the name in the endpoint's body of what the error names.
    """
    if isinstance(error, InvalidRequestError):
        param = param_of(error.param)
        if isinstance(error, ContextLengthError):
            return context_length_exceeded(error, param)
        return invalid_value(str(error), param)
    if isinstance(error, QueueFullError):
        return queue_full(str(error))
    if isinstance(error, FormNotCheckedError):
        return form_not_checked(str(error))
    if isinstance(error, EngineUnavailableError | EngineClosedError):
        return unavailable(UNAVAILABLE_CODES.get(state, "draining"))
    return server_error()


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
    failed: CompletionOutput, monitor: EngineMonitor, param_of: ParamOf = same_param
) -> ApiError:
    """The answer to a request that was accepted and then failed; arguments as of `error_of`."""
    match failed.error_kind:
        case "queue_timeout":
            return queue_timeout(monitor.timeouts.queue_s)
        case "request_timeout":
            return request_timeout(monitor.timeouts.total_s)
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
