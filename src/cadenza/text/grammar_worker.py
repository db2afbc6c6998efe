"""`GrammarWorker`: checks grammars in a process of its own, which can be killed.

Owns that process, the bounds on its time and memory, and the results, cached by the grammar's
bytes. A hostile grammar costs this process, not the server. Invariant: the grammars of one request
take at most `timeout_s` of its time together, plus the start of a process for each that died.
"""

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from importlib import import_module
from threading import Lock
from typing import NamedTuple

from cadenza.errors import FormNotCheckedError
from cadenza.text.grammar import GrammarCheck
from cadenza.text.grammar_check import check_grammar

TIMEOUT_S = 3.0
START_S = 60.0
MEMORY_BYTES = 1 << 30
MAX_CACHED = 1024

_LENGTH = struct.Struct("<I")


class CheckResult(NamedTuple):
    """Of the process: what is wrong with a grammar, and the seconds that it took. A final one holds
    for other requests, too."""

    problem: str | None
    taken_s: float
    is_final: bool = True


class GrammarWorker:
    """Thread-safe. The process starts with the first check and ends when this object does."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = Lock()
        """Held while the process checks; what is cached is found without it."""
        self._lock = Lock()
        self._found: OrderedDict[str, tuple[str | None]] = OrderedDict()

    def start_checks(self) -> GrammarCheck:
        """The check of one request's grammars, which have `timeout_s` together."""
        left_s = self._timeout_s

        def check(grammar: str) -> str | None:
            nonlocal left_s
            problem, taken_s = self._check_within(left_s, grammar)
            left_s -= taken_s
            return problem

        return check

    def check(self, grammar: str) -> str | None:
        """Of a request with one grammar."""
        return self.start_checks()(grammar)

    def _check_within(self, seconds: float, grammar: str) -> tuple[str | None, float]:
        """What is wrong with a grammar, and the seconds that the process took to find it."""
        found = self._cached(grammar)
        if found is not None:
            return found[0], 0.0
        with self._asking:
            found = self._cached(grammar)  # another thread may have asked meanwhile
            if found is not None:
                return found[0], 0.0
            if seconds <= 0 < self._timeout_s:
                return self._too_slow(seconds), 0.0
            answer = self._ask(grammar, seconds)
        if answer.is_final:
            self._keep(grammar, answer.problem)
        return answer.problem, answer.taken_s

    def _too_slow(self, seconds: float) -> str:
        bound = f"longer than {self._timeout_s:g} seconds to compile"
        if seconds < self._timeout_s:
            return f"with the request's other forms it takes {bound}; simplify them"
        return f"it takes {bound}; simplify it"

    def _cached(self, grammar: str) -> tuple[str | None] | None:
        with self._lock:
            if grammar in self._found:
                self._found.move_to_end(grammar)
            return self._found.get(grammar)

    def _keep(self, grammar: str, problem: str | None) -> None:
        with self._lock:
            self._found[grammar] = (problem,)
            if len(self._found) > MAX_CACHED:
                self._found.popitem(last=False)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: str, seconds: float) -> CheckResult:
        """Asks the process, which is ended if it takes longer than `seconds`.

        Only a process that started for this grammar has surely died of it: one that ran before may
        have been killed earlier, so that another is asked then, in what is left of the time.
        Raises FormNotCheckedError if none can be started.
        """
        is_new = self._process is None
        try:
            process = self._process = self._process or _start()
        except (OSError, EOFError) as error:
            raise FormNotCheckedError(
                "the structured output could not be checked, since no process could be started for "
                "it; try again soon"
            ) from error
        since_s = time.monotonic()
        try:
            answer = _answer_of(process, grammar, since_s + seconds)
        except (OSError, EOFError):
            self.close()
            taken_s = time.monotonic() - since_s
            if is_new:
                return CheckResult("it takes too much memory; simplify it", taken_s)
            again = self._ask(grammar, seconds - taken_s)
            return again._replace(taken_s=taken_s + again.taken_s)
        taken_s = time.monotonic() - since_s
        if answer is not None:
            return CheckResult(json.loads(answer), taken_s)
        self.close()
        # What did not fit into the rest of a request's time may fit into all of another's.
        return CheckResult(self._too_slow(seconds), taken_s, is_final=seconds >= self._timeout_s)


def _start() -> "subprocess.Popen[bytes]":
    """A process that has begun to read. Raises EOFError if it does not, OSError if none can start.

    None is left running where this raises.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "cadenza.text.grammar_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of a terminal are for the server
    )
    assert process.stdout is not None
    try:
        if _read_frame(process.stdout.fileno(), time.monotonic() + START_S) is None:
            raise EOFError
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def _answer_of(process: "subprocess.Popen[bytes]", grammar: str, until_s: float) -> bytes | None:
    """What a process finds; None at the deadline. Raises EOFError or OSError if it has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    payload = grammar.encode()
    process.stdin.write(_LENGTH.pack(len(payload)) + payload)
    process.stdin.flush()
    return _read_frame(process.stdout.fileno(), until_s)


def _read_frame(descriptor: int, until_s: float) -> bytes | None:
    """The next frame; None at the deadline. Raises EOFError."""
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
    """The process's program: an empty frame out; then a frame with a grammar in, a frame with the
    result out."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import_module("llguidance")  # its time is not the first grammar's
    received, sent = sys.stdin.buffer, sys.stdout.buffer
    sent.write(_LENGTH.pack(0))
    sent.flush()
    while length := received.read(_LENGTH.size):
        grammar = received.read(_LENGTH.unpack(length)[0]).decode()
        answer = json.dumps(check_grammar(grammar)).encode()
        sent.write(_LENGTH.pack(len(answer)) + answer)
        sent.flush()


if __name__ == "__main__":
    _serve()
