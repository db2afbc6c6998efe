"""`GrammarWorker`: checks grammars in a process of its own, which can be killed.

Owns that process, the bounds on its time and memory, and the results, cached by the grammar's
bytes. A hostile grammar costs this process, not the server. Invariant: `check` returns within
`timeout_s`, plus the start of a process.
"""

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from threading import Lock

from cadenza.text.grammar_check import check_grammar

TIMEOUT_S = 3.0
MEMORY_BYTES = 1 << 30
MAX_CACHED = 1024

_LENGTH = struct.Struct("<I")


class GrammarWorker:
    """Thread-safe. The process starts with the first check and ends when this object does."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = Lock()
        """Held while the process checks; what is cached is found without it."""
        self._lock = Lock()
        self._found: OrderedDict[str, tuple[str | None]] = OrderedDict()

    def check(self, grammar: str) -> str | None:
        """A `text.grammar.GrammarCheck`."""
        found = self._cached(grammar)
        if found is None:
            with self._asking:
                found = self._cached(grammar)  # another thread may have asked meanwhile
                if found is None:
                    found = self._keep(grammar, self._ask(grammar))
        return found[0]

    def _cached(self, grammar: str) -> tuple[str | None] | None:
        with self._lock:
            if grammar in self._found:
                self._found.move_to_end(grammar)
            return self._found.get(grammar)

    def _keep(self, grammar: str, problem: str | None) -> tuple[str | None]:
        with self._lock:
            found = self._found[grammar] = (problem,)
            if len(self._found) > MAX_CACHED:
                self._found.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: str) -> str | None:
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        payload = grammar.encode()
        try:
            process.stdin.write(_LENGTH.pack(len(payload)) + payload)
            process.stdin.flush()
            answer = _read_frame(process.stdout.fileno(), time.monotonic() + self._timeout_s)
        except (OSError, EOFError):
            self.close()
            return "it takes too much memory; simplify it"
        if answer is None:
            self.close()
            return f"it takes longer than {self._timeout_s:g} seconds to compile; simplify it"
        found: str | None = json.loads(answer)
        return found


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "cadenza.text.grammar_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of a terminal are for the server
    )


def _read_frame(descriptor: int, until_s: float) -> bytes | None:
    """The next frame; None at the deadline. Raises EOFError."""
    length = _read(descriptor, _LENGTH.size, until_s)
    return None if length is None else _read(descriptor, _LENGTH.unpack(length)[0], until_s)


def _read(descriptor: int, count: int, until_s: float) -> bytes | None:
    received = b""
    while len(received) < count:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0 or not select.select([descriptor], [], [], remaining_s)[0]:
            return None
        part = os.read(descriptor, count - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def _serve() -> None:
    """The process's program: a frame with a grammar in, a frame with the result out."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    received, sent = sys.stdin.buffer, sys.stdout.buffer
    while length := received.read(_LENGTH.size):
        grammar = received.read(_LENGTH.unpack(length)[0]).decode()
        answer = json.dumps(check_grammar(grammar)).encode()
        sent.write(_LENGTH.pack(len(answer)) + answer)
        sent.flush()


if __name__ == "__main__":
    _serve()
