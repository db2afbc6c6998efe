"""`InFlight`: a runner's launched, unread steps. Invariant: when the interpreter finalises, every
step is finished and no thread is inside JAX: before Python 3.14 a thread that acquires the GIL then
is unwound, and with C++ frames of JAX on its stack the process aborts. Releasing an array counts,
so `read` copies and releases under the lock."""

import atexit
import itertools
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from cadenza.errors import RunnerError


class InFlight:
    """The unread steps of one runner, `owner`, to which it keeps no reference. Hold `lock` during
    every JAX call for the runner; the exit handler acquires it and never releases it."""

    def __init__(self, owner: object) -> None:
        self.lock = threading.RLock()
        self._unread: dict[int, tuple[jax.Array, ...]] = {}
        self._keys = itertools.count()
        self._process_id = os.getpid()
        self._has_exited = False
        # weakref's own exit hook may run after JAX has removed its backends.
        atexit.register(self.finish_at_exit)
        weakref.finalize(owner, self.close).atexit = False

    def add(self, *results: jax.Array) -> int:
        """Returns the key for `read`; under `lock`."""
        key = next(self._keys)
        self._unread[key] = results
        return key

    def results(self, key: int) -> tuple[jax.Array, ...]:
        """As the device computes them; under `lock`. Raises RunnerError as `read` does."""
        if key not in self._unread:
            raise RunnerError("the step was dropped before it was read")
        return self._unread[key]

    def replace(self, key: int, *results: jax.Array) -> None:
        self._unread[key] = results

    def check_open(self) -> None:
        if self._has_exited:
            raise RunnerError("the interpreter is exiting; launch steps before it does")

    def read(self, key: int) -> tuple[npt.NDArray[Any], ...]:
        """Waits for a step and returns host copies of its results; once for each step. Raises the
        device's own error if the step failed, and RunnerError if the runner was closed or reset
        since. After an interrupted or failed wait, `finish` releases the step."""
        with self.lock:
            # Converting only afterwards leaves no callback for an XLA thread to run.
            self.results(key)[0].block_until_ready()
            return tuple([np.array(each) for each in self._unread.pop(key)])

    def finish(self) -> None:
        # Nothing in a forked child, where the device's threads do not exist.
        if os.getpid() != self._process_id:
            return
        with self.lock:
            while self._unread:
                key = next(iter(self._unread))
                with suppress(RuntimeError):  # the step failed
                    self._unread[key][0].block_until_ready()
                self._unread.pop(key, None)

    def close(self) -> None:
        self.finish()
        atexit.unregister(self.finish_at_exit)

    def finish_at_exit(self) -> None:
        """Keeps the lock, so that daemon threads block here, not in JAX."""
        if os.getpid() == self._process_id:
            self.lock.acquire()
            self._has_exited = True
            self.finish()
