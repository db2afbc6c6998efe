"""What sparse prefill gains and costs.

Modules:

- `options`: flags
- `measure`, `runs`: the order of the runs, and one run
- `tasks`, `baselines`: texts with questions; simpler ways to choose chunks
- `report`: JSON, text and charts
"""
