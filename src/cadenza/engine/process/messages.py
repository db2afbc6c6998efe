"""What the two processes say to each other, as typed messages in length-prefixed frames.

Owns the messages, their encoding (MessagePack, never pickle) and the frames' cap. Requests, events
and configurations travel as the dataclasses they are. Invariant: what does not decode to exactly
one of these types is a `WireError`, never a half-read message.
"""

import struct
from collections.abc import Iterator

import msgspec

from cadenza.config import EngineConfig
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats
from cadenza.errors import CadenzaError
from cadenza.request import Event, Finished, PromptLogprobs, Request, Started, Token

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class WireError(CadenzaError):
    """The other side did not keep to the protocol."""


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First of all: what to load. `log_level` is of the records worth sending."""

    model: str | None
    config: EngineConfig
    log_level: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A checked request under an id that grows."""

    request_id: int
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The request, or one of its samples, is wanted no more."""

    request_id: int
    sample: int | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and exit."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """A phase of the start has begun."""

    phase: str


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. `startup_s` has the seconds of each phase."""

    request_check: RequestCheck
    startup_s: dict[str, float]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; it exits. `kind` is the exception's class.

    `is_for_want`: it lacked file descriptors, so that another start may succeed.
    """

    kind: str
    message: str
    is_for_want: bool = False


class Report(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A step's events, and at the same time the step loop's sign of life.

    Args:
        num_steps: scheduled so far.
        is_idle: nothing is open.
        predicted_s: how long the next step may take.
        stats: left out of most frames.
    """

    num_steps: int
    is_idle: bool
    predicted_s: float
    started: tuple[Started, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    tokens: tuple[Token, ...] = ()
    finished: tuple[Finished, ...] = ()
    stats: EngineStats | None = None

    @property
    def events(self) -> list[Event]:
        """Each sample's in their order."""
        return [*self.started, *self.prompt_logprobs, *self.tokens, *self.finished]


ToEngine = Start | Submit | Cancel | Stop
FromEngine = Loading | Ready | Failed | Report

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame. Raises WireError above the cap."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(payload)} bytes is above the cap")
    return _LENGTH.pack(len(payload)) + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises WireError."""
    try:
        return _to_engine.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"the front end sent something unknown: {error}") from error


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises WireError."""
    try:
        return _from_engine.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"the engine sent something unknown: {error}") from error


class FrameBuffer:
    """Bytes in, in pieces of any size; whole payloads out."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._max_bytes = max_bytes

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The payloads that are now whole. Raises WireError at a length above the cap."""
        self._bytes += received
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, start)
                if length > self._max_bytes:
                    raise WireError(f"a frame of {length} bytes is above {self._max_bytes}")
                end = start + _LENGTH.size + length
                if len(self._bytes) < end:
                    break
                payload = bytes(self._bytes[start + _LENGTH.size : end])
                start = end
                yield payload
        finally:
            del self._bytes[:start]
