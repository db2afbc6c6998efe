"""Servers under the same loads, in alternating rounds.

Modules:

- `options`: flags
- `rounds`: the order of the rounds, and ratios
- `report`: JSON, text and charts
"""
