"""`CompileCount`: how many programs JAX has compiled in this process since some moment.

Listens to JAX's own events, which cannot be unlistened: one for each process is enough. Knows no
runner. Invariant: only grows.
"""

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCount:
    """Counts from when it is made; calling it gives the count."""

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def __call__(self) -> int:
        return self._count

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and duration_secs >= 0:
            self._count += 1
