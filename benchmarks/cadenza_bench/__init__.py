"""Cadenza's laboratory: the benchmarks that compare and simulate, and their reports.

`cadenza bench batching, compare, load, simulate, spec-prefill, startup`, loaded when asked for.
Invariant: it uses Cadenza's public face, the simulator its core as well.

Modules:

- `commands`: the flags of these commands, and what --quick stands for
- `load`, `startup`, `startup_probe`: how fast weights are loaded and an engine starts
- `fresh_process`: a new process that measures
- `plots`: charts as PNG and as one page; those of served loads

Beside them `batching`, `compare`, `simulate` and `spec_prefill` are packages.
"""
