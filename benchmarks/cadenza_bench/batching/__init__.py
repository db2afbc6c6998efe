"""Continuous batching beside other ways to batch, on one engine.

Modules:

- `plan`: flags, settings, requests
- `rounds`: the order of the runs, and the comparison of their tokens
- `player`: requests on an engine under a policy of batching
- `figures`, `bars`: figures; what lengths and rates allow, and what is asked for
- `report`: JSON, text and charts
"""
