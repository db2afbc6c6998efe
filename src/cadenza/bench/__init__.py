"""Measuring Cadenza on this machine: throughput against its bound, the bound itself, start-up.

Owns what is measured and how; what people read of it is `cli.bench`'s. Knows the engine through
its public faces only. Invariant: a figure is never printed without what it was measured on.
"""
