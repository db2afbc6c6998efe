"""Which error an answer is, when an engine's or the package's error is the cause.

Invariant: what a client is told depends on the error's kind, never on its text, unless the text was
written for it (`InvalidRequestError`).
"""

from cadenza.engine.status import EngineMonitor, EngineState
from cadenza.errors import (
    CadenzaError,
    ContextLengthError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from cadenza.request import ErrorKind
from cadenza.server.errors import (
    ApiError,
    context_length_exceeded,
    invalid_value,
    queue_full,
    queue_timeout,
    request_timeout,
    server_error,
    step_failed,
    unavailable,
)

UNAVAILABLE_CODES: dict[EngineState, str] = {
    "loading": "loading",
    "draining": "draining",
    "restarting": "engine_restarting",
    "dead": "engine_dead",
}


def error_of(error: CadenzaError, state: EngineState, prompt_field: str = "prompt") -> ApiError:
    """The answer to a request that was refused.

    Args:
        state: the engine's.
        prompt_field: what a client calls the prompt in this endpoint.
    """
    if isinstance(error, InvalidRequestError):
        param = prompt_field if error.param == "prompt" else error.param
        if isinstance(error, ContextLengthError):
            return context_length_exceeded(str(error), param)
        return invalid_value(str(error), param)
    if isinstance(error, QueueFullError):
        return queue_full(str(error))
    if isinstance(error, EngineUnavailableError | EngineClosedError):
        return unavailable(UNAVAILABLE_CODES.get(state, "draining"))
    return server_error()


def error_of_end(kind: ErrorKind | None, monitor: EngineMonitor) -> ApiError:
    """The answer to a request that was accepted and then failed."""
    match kind:
        case "queue_timeout":
            return queue_timeout(monitor.timeouts.queue_s)
        case "request_timeout":
            return request_timeout(monitor.timeouts.total_s)
        case "none_allowed":
            return invalid_value(
                "no token may follow: allowed_token_ids, bad_words and min_tokens together rule "
                "out every one; loosen one of them",
                "allowed_token_ids",
            )
        case "step_failed":
            return step_failed()
        case "text_failed":
            return server_error("the text of this answer could not be made")
        case "engine_closed":
            return unavailable("draining")
        case "engine_lost":
            is_dead = monitor.status().state == "dead"
            return unavailable("engine_dead" if is_dead else "engine_restarting")
        case _:
            return server_error("the model's numbers broke down on this request")
