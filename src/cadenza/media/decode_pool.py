"""`DecodePool`: decodes and resizes images in child processes, which can be killed. An image that
ends its process, or takes longer than `wall_s`, is an error of that image alone, and the process is
replaced; nothing from outside is executed or unpickled."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

from cadenza.errors import EngineUnavailableError, QueueFullError
from cadenza.media.decode_worker import LENGTH, Bounds, frame_of, processor_spec
from cadenza.media.image_input import Detail, ImageFault, OpenedImage

if TYPE_CHECKING:
    from cadenza.vision.processor import ImageProcessor

NUM_PROCESSES = 2
WALL_S = 15.0  # of one image, after which its process is killed
START_S = 60.0  # of a process, on a busy machine
_EXIT_S = 5.0  # between a process's last output and its end

_CLOSED = "the images could not be decoded, since the server ends"
_NOT_STARTED = "the images could not be decoded, since no process could be started; try again"
_ENDED = (
    "its decoding failed, or was ended since it took over {cpu_s:g} s of processor time, "
    "{wall_s:g} s in all, or more memory than is allowed; make it smaller, or save it anew"
)


class DecodePool:
    """Thread-safe. Processes start with the first images and end by `close`. `bounds`: of each
    process. `wall_s`: of one image, once a process works on it. `command`: starts a process; it
    ends in `decode_worker`'s arguments."""

    def __init__(
        self,
        *,
        num_processes: int = NUM_PROCESSES,
        bounds: Bounds | None = None,
        wall_s: float = WALL_S,
        command: tuple[str, ...] = (sys.executable, "-m", "cadenza.media.decode_worker"),
    ) -> None:
        self._bounds = bounds or Bounds()
        self._wall_s = wall_s
        arguments = (str(self._bounds.memory_bytes), str(self._bounds.cpu_s))
        self._command = (*command, *arguments)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="cadenza-images")
        self._processes = [_Process(self._command) for _ in range(num_processes)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._is_closed = False

    def submit(
        self, data: bytes, processor: "ImageProcessor", detail: Detail
    ) -> "Future[OpenedImage]":
        """The upright image, resized by the processor; the future has ImageFault, QueueFullError
        where no process can be started, or EngineUnavailableError after `close`."""
        try:
            return self._threads.submit(self._decode, data, processor, detail)
        except RuntimeError:
            raise EngineUnavailableError(_CLOSED) from None

    def start(self) -> None:
        """Starts the processes before the first image. Slow. Raises QueueFullError."""
        for process in self._processes:
            self._ensure(process)

    def close(self) -> None:
        """Ends the processes; images that wait are dropped. Idempotent."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.close()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes if each.pid is not None]

    def _decode(self, data: bytes, processor: "ImageProcessor", detail: Detail) -> OpenedImage:
        """On a thread of the pool, so that a process is idle."""
        process = self._idle.get()
        try:
            return self._ask(process, data, processor, detail)
        finally:
            self._idle.put(process)

    def _ask(
        self, process: "_Process", data: bytes, processor: "ImageProcessor", detail: Detail
    ) -> OpenedImage:
        """Raises ImageFault, QueueFullError, EngineUnavailableError."""
        job = {"num_bytes": len(data), "detail": detail, "processor": processor_spec(processor)}
        was_new = self._ensure(process)
        try:
            answer, payload = process.ask(job, data, time.monotonic() + self._wall_s)
        except (OSError, EOFError, TimeoutError) as error:
            is_late = isinstance(error, TimeoutError)
            status = process.close(0.0 if is_late else _EXIT_S)
            if self._is_closed:
                raise EngineUnavailableError(_CLOSED) from None
            if not was_new and not is_late and status != -signal.SIGPROF:
                # Another may have killed it while it was idle; a new one tells.
                return self._ask(process, data, processor, detail)
            limits = {"cpu_s": self._bounds.cpu_s, "wall_s": self._wall_s}
            raise ImageFault(_ENDED.format(**limits)) from None
        if "fault" in answer:
            raise ImageFault(answer["fault"])
        parts: list[bytes] = []
        for length in answer["parts"]:
            start = sum(map(len, parts))
            parts.append(payload[start : start + length])
        return OpenedImage(width=answer["width"], height=answer["height"], parts=tuple(parts))

    def _ensure(self, process: "_Process") -> bool:
        """Also replaces a process that ended while it was idle. Returns whether it is new."""
        try:
            return process.ensure()
        except (OSError, EOFError, TimeoutError):
            process.close()
            if self._is_closed:
                raise EngineUnavailableError(_CLOSED) from None
            raise QueueFullError(_NOT_STARTED) from None


class _Process:
    """One process; used by one thread at a time, except for `kill`."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def ensure(self) -> bool:
        """Starts a process if none runs; whether it did. Raises EOFError, OSError, TimeoutError."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is not None:
            return False
        with self._lock:
            if self._is_over:
                raise EOFError
            self._process = process = subprocess.Popen(  # noqa: S603  this package's program
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # signals of a terminal are for the server
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads take address space
            )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._frame(time.monotonic() + START_S)
        return True

    def ask(self, job: dict[str, Any], data: bytes, until_s: float) -> tuple[dict[str, Any], bytes]:
        """Raises EOFError or OSError where it has ended, TimeoutError."""
        for payload in (frame_of(job), data):
            self._write(payload, until_s)
        answer = self._frame(until_s)
        return answer, self._read(sum(answer.get("parts", ())), until_s)

    def kill(self) -> None:
        """Also keeps it from being started again."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.kill()

    def close(self, grace_s: float = 0.0) -> int | None:
        """Waits for `grace_s`, then kills it; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode

    def _frame(self, until_s: float) -> dict[str, Any]:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until_s))
        return json.loads(self._read(length, until_s))

    def _write(self, payload: bytes, until_s: float) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        left = memoryview(payload)
        while left:
            _wait(process.stdin.fileno(), select.POLLOUT, until_s)
            left = left[os.write(process.stdin.fileno(), left) :]

    def _read(self, count: int, until_s: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        received = bytearray()
        while len(received) < count:
            _wait(process.stdout.fileno(), select.POLLIN, until_s)
            part = os.read(process.stdout.fileno(), min(count - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _wait(descriptor: int, event: int, until_s: float) -> None:
    poll = select.poll()  # `select` refuses descriptors from 1024 on
    poll.register(descriptor, event)
    remaining_s = until_s - time.monotonic()
    if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
        raise TimeoutError
