"""`InFlight`: the steps that a runner has launched and whose results have not been read.

Owns the end of a runner's work on the device: on close, on reset, when the runner is collected and
when the interpreter exits. Knows no model. Invariant: when the interpreter finalises, the device
has finished every step, and no thread is inside JAX on behalf of the runner.

Until Python 3.14 a thread that asks for the GIL during finalisation is ended by unwinding its
stack. With C++ frames of JAX on that stack the process aborts: `terminate called without an active
exception`. That is true of XLA's own threads and of a daemon thread that steps an engine. Even
dropping the last reference to an array is being inside JAX: its destructor gives the GIL up and
takes it again. So results are dropped here, under the lock, and what is read is a copy.
"""

import atexit
import os
import threading
import weakref
from contextlib import suppress

import jax
import numpy as np
import numpy.typing as npt

from cadenza.errors import RunnerError


class InFlight:
    """Of one runner, `owner`, which is not kept alive.

    Whoever calls JAX for the runner holds `lock` meanwhile: the exit waits for it, and keeps it.
    """

    def __init__(self, owner: object) -> None:
        self.lock = threading.RLock()
        self._unread: dict[int, jax.Array] = {}
        self._process_id = os.getpid()
        self._has_exited = False
        # Not by weakref's own exit hook, which may run after JAX has removed its backends.
        atexit.register(self.finish_at_exit)
        weakref.finalize(owner, self.close).atexit = False

    def add(self, result: jax.Array) -> int:
        """Keeps the result of a step that was launched under `lock`; the key to read it by."""
        self._unread[id(result)] = result
        return id(result)

    def check_open(self) -> None:
        """Raises RunnerError once the interpreter exits."""
        if self._has_exited:
            raise RunnerError("the interpreter is exiting; launch steps before it does")

    def read(self, key: int) -> npt.NDArray[np.int32]:
        """A copy of a step's result on the host, once.

        Raises what the device raised, or RunnerError where the runner was closed or reset
        meanwhile. A read that was interrupted, or failed, leaves the step to `finish`.
        """
        with self.lock:
            if key not in self._unread:
                raise RunnerError("the step was dropped before it was read")
            # Only then is converted: no callback is left to a thread of XLA's.
            self._unread[key].block_until_ready()
            return np.array(self._unread.pop(key))

    def finish(self) -> None:
        """Waits for every step that has not been read; what it gave does not matter any more.

        Does nothing in a forked child: the device's threads are its parent's.
        """
        if os.getpid() != self._process_id:
            return
        with self.lock:
            while self._unread:
                key = next(iter(self._unread))
                with suppress(RuntimeError):  # the step failed
                    self._unread[key].block_until_ready()
                self._unread.pop(key, None)

    def close(self) -> None:
        """Finishes; the interpreter's exit has nothing left to do. Idempotent."""
        self.finish()
        atexit.unregister(self.finish_at_exit)

    def finish_at_exit(self) -> None:
        """Finishes and keeps the lock, so that daemon threads wait here instead of in JAX."""
        if os.getpid() == self._process_id:
            self.lock.acquire()
            self._has_exited = True
            self.finish()
