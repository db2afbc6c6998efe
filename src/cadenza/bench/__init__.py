"""Measuring Cadenza on this machine: throughput against its bound, the bound itself, start-up.

Owns what is measured and how; flags, tables and JSON are `cli.bench`'s. Knows the engine through
its public faces only. Invariant: every figure comes with the machine that it was measured on.

Modules:

- `workloads`: settings of `throughput`, and bounds that benchmarks share
- `throughput`, `runs`, `bounds`: tokens a second, the timed runs, and the machine's bound for them
- `remaining`: how long the runs that are left will take
- `machine`: the machine's description and roofline, and measuring in a fresh process
- `startup`, `startup_probe`, `load`: time to the first token; rate of loading
- `serve_options`, `datasets`, `arrivals`: loads on servers, their prompts, and when they are due
- `serve`, `serve_client`, `client_watch`: how a server is loaded, by a client that is watched
- `serve_figures`, `serve_plots`, `compare`: the figures, their charts, and those of several servers
- `batching`, `batching_plan`, `batching_player`: continuous batching beside other ways to batch:
  rounds, settings and requests, modes
- `batching_figures`, `batching_ideal`, `batching_bars`: their figures, and what these are held to
- `spec_prefill`, `spec_prefill_options`, `spec_prefill_runs`: what sparse prefill gains and costs
- `spec_prefill_tasks`, `spec_prefill_baselines`: its tasks; simpler ways to choose chunks
- `traffic`: the requests of a simulation, and when they arrive
- `simulate`, `simulated_group`: the engine's core over steps that only take time; several as one
- `plots`: charts as PNG and as one page
- `checkpoints`: random checkpoints in the cache folder
"""

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds."""

OnStatus = Callable[[str], None]
"""Receives a line that says what is being measured."""
