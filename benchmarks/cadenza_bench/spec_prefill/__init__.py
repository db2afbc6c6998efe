"""What sparse prefill gains and costs.

Modules:

- `options`: flags
- `measure`, `runs`: the order of the runs, and one run; simpler ways to choose chunks
- `tasks`: texts with questions
- `report`: JSON, text and charts
"""
