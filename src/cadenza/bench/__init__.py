"""Measuring this machine, an engine on it, and servers; what compares is in `cadenza_bench`.

Invariants: the engine is known by its public faces only; every figure comes with its machine.

Modules:

- `workloads`: settings of `throughput`, and bounds that benchmarks share
- `throughput`, `runs`: tokens a second, and the timed runs
- `machine`: the machine's description and roofline, and what it allows a model
- `serve_options`, `datasets`: loads on servers, their prompts, and when they are due
- `serve`, `serve_client`: how a server is loaded, by a client that is watched
- `serve_figures`: the figures of a served load
- `checkpoints`: random checkpoints in the cache folder
"""

from collections.abc import Callable

Clock = Callable[[], float]

OnStatus = Callable[[str], None]  # receives a line that says what is being measured
