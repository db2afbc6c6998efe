"""The child process that decodes and resizes images: `serve_jobs`. An image costs at most this
process. A job: JSON {"num_bytes", "detail", "processor"}, then the file. An answer: {"width",
"height", "parts": their lengths}, then their pixels, or {"fault": what is wrong}."""

import json
import resource
import signal
import struct
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import msgspec

from cadenza.errors import InvalidRequestError
from cadenza.media.decoding import prepared
from cadenza.media.image_input import ImageFault, OpenedImage

if TYPE_CHECKING:
    from cadenza.vision.processor import ImageProcessor

MEMORY_BYTES = 1 << 30
CPU_S = 10.0  # of one image

LENGTH = struct.Struct("<I")
_TOO_LARGE = "it takes too much memory to decode; make it smaller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one process may use."""

    memory_bytes: int = MEMORY_BYTES  # of its address space
    cpu_s: float = CPU_S  # of each image


def processor_spec(processor: "ImageProcessor") -> dict[str, str]:
    """From this another process makes an equal processor: a dataclass of plain values."""
    kind = type(processor)
    fields = msgspec.json.encode(processor).decode()
    return {"module": kind.__module__, "name": kind.__qualname__, "fields": fields}


def processor_of(spec: dict[str, str]) -> "ImageProcessor":
    """Of our own `processor_spec`, never of a client's bytes."""
    kind = getattr(import_module(spec["module"]), spec["name"])
    return msgspec.json.decode(spec["fields"], type=kind)


def frame_of(head: dict[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    return LENGTH.pack(len(text)) + text


def serve_jobs(received: IO[bytes], sent: IO[bytes], bounds: Bounds) -> None:
    """Answers jobs until there are no more; SIGPROF ends one that takes too long."""
    _limit(bounds)
    _send(sent, {})
    processor, spec = None, None
    while length := received.read(LENGTH.size):
        job = json.loads(received.read(LENGTH.unpack(length)[0]))
        data = received.read(job["num_bytes"])
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
        try:
            if processor is None or job["processor"] != spec:
                spec = job["processor"]
                processor = processor_of(spec)
            _answer(sent, prepared(data, processor, job["detail"]))
        except (ImageFault, InvalidRequestError) as fault:
            _send(sent, {"fault": str(fault)})
        except MemoryError:
            _send(sent, {"fault": _TOO_LARGE})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        del data


def _answer(sent: IO[bytes], opened: OpenedImage) -> None:
    parts = opened.parts or ()
    head = {"width": opened.width, "height": opened.height, "parts": [*map(len, parts)]}
    _send(sent, head, *parts)


def _send(sent: IO[bytes], head: dict[str, Any], *payloads: bytes) -> None:
    for payload in (frame_of(head), *payloads):
        sent.write(payload)
    sent.flush()


def _limit(bounds: Bounds) -> None:
    """No more memory, no file written, no core."""
    import_module("cadenza.media.decoding")
    for kind, bound in (
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (bound, bound))


if __name__ == "__main__":
    serve_jobs(
        sys.stdin.buffer,
        sys.stdout.buffer,
        Bounds(memory_bytes=int(sys.argv[1]), cpu_s=float(sys.argv[2])),
    )
