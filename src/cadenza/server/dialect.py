"""`Dialect`: the API that a path belongs to: the shapes of its errors, its streams' type, the
headers that name a request. Invariant: an error means the same in each dialect; only its shape
differs, and 503, which is 529 in Anthropic's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cadenza.server.errors import ApiError, invalid_value

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"

ANTHROPIC_VERSIONS = ("2023-06-01", "2026-10-21")
"""What the newer one removes from requests is still accepted."""

_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API's.

    Args:
        status_of: of an error's answer.
        error_body: the JSON of an error, of the request with an id.
        check_version: refuses a version of the API; takes a header's value.
        error_schema: the name of its errors' schema in the API's description.
        stream_type: the media type of a stream.
        takes_unlabelled: whether a body that is labelled as nothing, as text or as a form's is
            JSON where no page sent it, since clients of the API set no type.
    """

    id_headers: tuple[str, ...]
    version_header: bytes | None
    status_of: Callable[[ApiError], int]
    error_body: Callable[[ApiError, str], bytes]
    check_version: Callable[[bytes], None]
    error_schema: str = "Error"
    stream_type: str = EVENT_STREAM
    takes_unlabelled: bool = False


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The answer, or a stream's last event."""
    described: dict[str, Any] = {
        "type": _ANTHROPIC_TYPES[error.status],
        "message": _with_field(error),
    }
    if error.details is not None:
        described["details"] = error.details
    return {"type": "error", "error": described, "request_id": request_id}


def _with_field(error: ApiError) -> str:
    """The message, which names the field at fault: the API's errors have no member for it."""
    param = error.param
    if error.in_anthropic is not None:
        return f"{error.in_anthropic}. {error.message}"
    if param is None or param in error.message:
        return error.message
    return f"{param}: {error.message}"


def ollama_error(error: ApiError) -> dict[str, str]:
    """The answer, or a stream's last line: a text alone, which names the field at fault."""
    return {"error": _with_field(error)}


def _check_anthropic_version(version: bytes) -> None:
    text = version.decode("latin-1").strip()
    if text not in ANTHROPIC_VERSIONS:
        known = ", ".join(ANTHROPIC_VERSIONS)
        raise invalid_value(f"anthropic-version is {text[:32]!r}; there are {known}", None)


OPENAI = Dialect(
    id_headers=("x-request-id",),
    version_header=None,
    status_of=lambda error: error.status,
    error_body=lambda error, _: error.body(),
    check_version=lambda _: None,
)
ANTHROPIC = Dialect(
    id_headers=("x-request-id", "request-id"),
    version_header=b"anthropic-version",
    status_of=lambda error: _OVERLOADED if error.status == 503 else error.status,
    error_body=lambda error, request_id: msgspec.json.encode(anthropic_error(error, request_id)),
    check_version=_check_anthropic_version,
    error_schema="MessageError",
)
OLLAMA = Dialect(
    id_headers=("x-request-id",),
    version_header=None,
    status_of=lambda error: error.status,
    error_body=lambda error, _: msgspec.json.encode(ollama_error(error)),
    check_version=lambda _: None,
    error_schema="TextError",
    stream_type=NDJSON,
    takes_unlabelled=True,
)

_PATHS = {"/v1/messages": ANTHROPIC, "/api": OLLAMA}


def dialect_of(path: str) -> Dialect:
    """Also of a path without a route."""
    for place, dialect in _PATHS.items():
        if path == place or path.startswith(f"{place}/"):
            return dialect
    return OPENAI
