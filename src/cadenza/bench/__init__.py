"""Measuring Cadenza on this machine: throughput against its bound, the bound itself, start-up.

Owns what is measured and how; flags, tables and JSON are `cli.bench`'s. Knows the engine through
its public faces only. Invariant: every figure comes with the machine that it was measured on.
"""

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds."""

OnStatus = Callable[[str], None]
"""Receives a line that says what is being measured."""
