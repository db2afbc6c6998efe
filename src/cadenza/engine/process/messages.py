"""The protocol between the two processes: typed messages in frames (MessagePack, never pickle), and
log records as lines. Invariants: bytes that do not decode to exactly one of these types are a
`WireError`, never a half-read message; one log record is one line, and none is kept beyond a
cap."""

import json
import logging
import struct
from collections.abc import Iterator

import msgspec

from cadenza import errors
from cadenza.config import EngineConfig
from cadenza.engine.batch_engine import Cancel, Resume, Submit
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.route_report import RouteReport
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import StepSummary, Watch
from cadenza.errors import CadenzaError, RunnerError
from cadenza.events import Report
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")

LOG_MARK = "\x1e"
MAX_LOG_LINE_BYTES = 1 << 16
# The logger of lines that are no log record: a library's warning, a crash's last output.
OUTPUT_LOGGER = "cadenza.engine.process.output"


class WireError(CadenzaError):
    """The other process broke the protocol."""


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what to load."""

    model: str | None
    config: EngineConfig
    log_level: int
    is_restart: bool = False  # `config` has the sizes that an earlier process planned
    front_end_bytes: int = 0  # private memory of the front end's process; 0 if unknown
    bodies_bytes: int = 0  # of all bodies that it reads at the same time, at most
    # of the machine's memory, that this engine may take beside others of the same front end; None:
    # all that is available
    share_bytes: int | None = None
    num_engines: int = 1  # of that front end, at the same time, which share a GPU's memory equally
    # keys pages, unless a folder of pages has a secret of its own; the engine then reports what it
    # holds. None: it is the only one, and need not.
    prefix_secret: bytes | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and exit."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """A phase of the start has begun."""

    phase: str


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Streams go on in an engine with an equal `identity`, a digest of all that decides their
    bits."""

    request_check: RequestCheck
    identity: str
    fingerprint: Fingerprint | None = None
    kernel_proof: KernelProof | None = None
    startup_s: dict[str, float]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`kind`: the exception's class. `is_shortage`: it lacked descriptors, so that a later start
    may succeed."""

    kind: str
    message: str
    is_shortage: bool = False

    def exception(self) -> CadenzaError:
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, CadenzaError):
            return found(self.message)
        return RunnerError(self.message)


class EngineOutputs(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A step's events, and the step loop's heartbeat."""

    num_steps: int  # scheduled so far
    is_idle: bool  # no request is open
    predicted_s: float  # the forecast of the next step's time
    events: tuple[Report, ...] = ()
    stats: EngineStats | None = None  # in some of them only
    summary: StepSummary | None = None  # likewise, while somebody watches
    route: RouteReport | None = None  # likewise, where the engine is one of several


ToEngine = Start | Submit | Resume | Cancel | Watch | Stop
FromEngine = Loading | Ready | Failed | EngineOutputs

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(payload)} bytes is above the cap")
    return framed(payload)


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    try:
        return _to_engine.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"the front end sent something unknown: {error}") from error


def decode_from_engine(payload: bytes) -> FromEngine:
    try:
        return _from_engine.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"the engine sent something unknown: {error}") from error


class FrameBuffer:
    """Cuts received bytes, in pieces of any size, into payloads."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._max_bytes = max_bytes

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Raises WireError at a length above the cap."""
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


class LineFormatter(logging.Formatter):
    """A record's level, logger and message as one marked line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return LOG_MARK + json.dumps([record.levelno, record.name, text])


class LogLines:
    """Bytes of the pipe as (level, logger, message)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[tuple[int, str, str]]:
        """A line above the cap is cut."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MAX_LOG_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            yield from _record_of(line)

    def flush(self) -> Iterator[tuple[int, str, str]]:
        """The last line came without a newline."""
        rest, self._rest = self._rest, b""
        yield from _record_of(rest)


def _record_of(line: bytes) -> Iterator[tuple[int, str, str]]:
    text = line.decode(errors="replace").rstrip()
    if not text:
        return
    if text.startswith(LOG_MARK):
        try:
            level, name, message = json.loads(text[len(LOG_MARK) :])
            yield int(level), str(name), str(message)
            return
        except (ValueError, TypeError):
            pass
    yield logging.WARNING, OUTPUT_LOGGER, text
