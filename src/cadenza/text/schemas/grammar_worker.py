"""`GrammarWorker`: checks grammars in processes, which can be killed. Invariant: the grammars of
one request take at most `cpu_s` of processor time together. That does not depend on the machine's
load, so what is refused is refused always; results are cached by the grammar's bytes, timeouts are
not."""

import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from threading import Condition, Lock
from typing import Any, NamedTuple

from cadenza.errors import FormNotCheckedError
from cadenza.text.schemas.grammar import GrammarCheck, check_grammar
from cadenza.text.schemas.schema_check import is_valid

CPU_S = 3.0
QUICK_CPU_S = 0.25
"""Of a first attempt, for which only grammars of such a size wait; what takes longer is checked
again by another process."""

WALL_S = 60.0  # after that nothing is said about a grammar but that it may be sent again
MEMORY_BYTES = 1 << 30
MAX_CACHED = 1024
_LENGTH = struct.Struct("<I")
_NOT_CHECKED = "the structured output could not be checked, since {}; try again soon"

Job = dict[str, Any]  # a grammar to check, or a text to validate by a schema


class Checked(NamedTuple):
    """What a process found, and the processor time that it took."""

    result: Any
    cpu_s: float


class OutOfCpuError(Exception):
    """A process was ended at its bound of processor time."""


class OutOfMemoryError(Exception):
    """A process that had done nothing else could not go on within its memory."""


class GrammarWorker:
    """Thread-safe. Processes start with the first check and end with this object. `cpu_s`: of the
    grammars of a request together; `quick_cpu_s`: of a first attempt; `wall_s`: of one check with
    its wait; `lanes`: those of first attempts and of further ones."""

    def __init__(
        self,
        *,
        cpu_s: float = CPU_S,
        quick_cpu_s: float = QUICK_CPU_S,
        wall_s: float = WALL_S,
        lanes: "tuple[Lane, Lane] | None" = None,
    ) -> None:
        self._cpu_s = cpu_s
        self._quick_cpu_s = quick_cpu_s
        self._wall_s = wall_s
        self._quick, self._slow = lanes or (Lane(), Lane())
        self._lock = Lock()
        self._found: OrderedDict[str, Checked] = OrderedDict()

    def start_checks(self) -> GrammarCheck:
        """The check of one request's grammars. One that is known counts with the time that its
        check took, so that refusals do not depend on earlier requests."""
        left_s = self._cpu_s

        def check(grammar: str) -> str | None:
            nonlocal left_s
            try:
                found = self._checked(grammar, left_s)
            except OutOfCpuError:
                return self._too_slow(left_s)
            except OutOfMemoryError:
                return "it takes too much memory; simplify it"
            if found.cpu_s > left_s:
                return self._too_slow(left_s)
            left_s -= found.cpu_s
            return found.result

        return check

    def check(self, grammar: str) -> str | None:
        return self.start_checks()(grammar)

    def is_valid(self, text: str, schema: str) -> bool:
        job = {"text": text, "schema": schema}
        try:
            return bool(self._run_twice(job, self._cpu_s).result)
        except (OutOfCpuError, OutOfMemoryError, FormNotCheckedError):
            return False

    def close(self) -> None:
        for lane in (self._quick, self._slow):
            lane.close()

    def _checked(self, grammar: str, left_s: float) -> Checked:
        found = self._cached(grammar)
        if found is not None:
            return found
        if left_s <= 0:
            raise OutOfCpuError
        found = self._run_twice({"grammar": grammar}, left_s)
        self._keep(grammar, found)
        return found

    def _run_twice(self, job: Job, left_s: float) -> Checked:
        until_s, quick_s = time.monotonic() + self._wall_s, min(self._quick_cpu_s, left_s)
        try:
            return self._run(self._quick, job, quick_s, until_s)
        except OutOfCpuError:
            if quick_s == left_s:
                raise
            return self._run(self._slow, job, left_s, until_s)

    def _run(self, lane: "Lane", job: Job, cpu_s: float, until_s: float) -> Checked:
        with lane.turn(sum(map(len, job.values())), until_s):
            if "grammar" in job:
                found = self._cached(job["grammar"])  # another thread may have asked meanwhile
                if found is not None:
                    return found
            try:
                return lane.ask(job, cpu_s, until_s)
            except EOFError:
                return lane.ask_alone(job, cpu_s, until_s)

    def _too_slow(self, left_s: float) -> str:
        bound = f"longer than {self._cpu_s:g} seconds of processor time to compile"
        if left_s < self._cpu_s:
            return f"with the request's other forms it takes {bound}; simplify them"
        return f"it takes {bound}; simplify it"

    def _cached(self, grammar: str) -> Checked | None:
        with self._lock:
            if grammar in self._found:
                self._found.move_to_end(grammar)
            return self._found.get(grammar)

    def _keep(self, grammar: str, found: Checked) -> None:
        with self._lock:
            self._found[grammar] = found
            if len(self._found) > MAX_CACHED:
                self._found.popitem(last=False)


class Lane:
    """One process, and the threads that wait for it: those with the smallest jobs first."""

    def __init__(self) -> None:
        self._last_status: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._changed = Condition()
        self.waiting: list[tuple[int, int]] = []
        self._num_come = 0
        self._is_busy = False

    @contextmanager
    def turn(self, size: int, until_s: float) -> Generator[None]:
        """Raises FormNotCheckedError where the wait is too long."""
        with self._changed:
            mine = (size, self._num_come)
            self._num_come += 1
            heapq.heappush(self.waiting, mine)
            while self._is_busy or self.waiting[0] != mine:
                if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    self.waiting.remove(mine)
                    heapq.heapify(self.waiting)
                    self._changed.notify_all()
                    raise FormNotCheckedError(_NOT_CHECKED.format("too many wait for it"))
            heapq.heappop(self.waiting)
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def ask(self, job: Job, cpu_s: float, until_s: float) -> Checked:
        """Raises EOFError where the process has died, OutOfCpuError, FormNotCheckedError."""
        try:
            process = self.process = self.process or _start()
        except (OSError, EOFError) as error:
            problem = "no process could be started for it"
            raise FormNotCheckedError(_NOT_CHECKED.format(problem)) from error
        try:
            answer = _answer_of(process, {**job, "cpu_s": cpu_s}, until_s)
        except (OSError, EOFError):
            if self.close(_EXIT_S) == -signal.SIGPROF:
                raise OutOfCpuError from None
            raise EOFError from None
        if answer is None:
            self.close()
            raise FormNotCheckedError(_NOT_CHECKED.format("the machine has too much to do"))
        found = json.loads(answer)
        if found is None:
            self.close()
            raise OutOfMemoryError
        return Checked(*found)

    def ask_alone(self, job: Job, cpu_s: float, until_s: float) -> Checked:
        """As `ask`, of a process that has done nothing else: it died of this job, unless it was
        killed. Raises OutOfMemoryError, FormNotCheckedError."""
        self.close()
        try:
            return self.ask(job, cpu_s, until_s)
        except EOFError as error:
            if self._last_status in _DIED_OF_ITSELF:
                raise OutOfMemoryError from None
            raise FormNotCheckedError(_NOT_CHECKED.format("its process was killed")) from error

    def close(self, grace_s: float = 0.0) -> int | None:
        """Ends the process, unless it does so by itself; its exit status."""
        process, self.process = self.process, None
        if process is None:
            return None
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        self._last_status = process.returncode
        return process.returncode


_EXIT_S = 5.0  # between a process's last output and its end
_DIED_OF_ITSELF = frozenset({1, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})


def _start() -> "subprocess.Popen[bytes]":
    # None is left running where this raises.
    process = subprocess.Popen(
        [sys.executable, "-m", "cadenza.text.schemas.grammar_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of a terminal are for the server
    )
    assert process.stdout is not None
    try:
        if _read_frame(process.stdout.fileno(), time.monotonic() + WALL_S) is None:
            raise EOFError
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def _answer_of(process: "subprocess.Popen[bytes]", job: Job, until_s: float) -> bytes | None:
    """None at the deadline. Raises EOFError or OSError if the process has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    payload = json.dumps(job).encode()
    process.stdin.write(_LENGTH.pack(len(payload)) + payload)
    process.stdin.flush()
    return _read_frame(process.stdout.fileno(), until_s)


def _read_frame(descriptor: int, until_s: float) -> bytes | None:
    length = _read(descriptor, _LENGTH.size, until_s)
    return None if length is None else _read(descriptor, _LENGTH.unpack(length)[0], until_s)


def _read(descriptor: int, count: int, until_s: float) -> bytes | None:
    received = b""
    poll = select.poll()  # `select` refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    while len(received) < count:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
            return None
        part = os.read(descriptor, count - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def _serve() -> None:
    """An empty frame out; then a frame with a job in, a frame with what was found and its processor
    time out. A job without end is ended by SIGPROF."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import_module("llguidance")  # its time is not the first grammar's
    received, sent = sys.stdin.buffer, sys.stdout.buffer
    sent.write(_LENGTH.pack(0))
    sent.flush()
    while length := received.read(_LENGTH.size):
        answer = json.dumps(_done(received.read(_LENGTH.unpack(length)[0]))).encode()
        sent.write(_LENGTH.pack(len(answer)) + answer)
        sent.flush()


def _done(payload: bytes) -> tuple[object, float] | None:
    job: Job = json.loads(payload)
    since_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, max(job["cpu_s"], 1e-3))
    try:
        if "grammar" in job:
            return check_grammar(job["grammar"]), time.process_time() - since_s
        return is_valid(job["text"], job["schema"]), time.process_time() - since_s
    except MemoryError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _serve()
