"""Servers under the same loads, in alternating rounds.

Modules:

- `options`: flags
- `rounds`: the order of the rounds, ratios, and what is printed
"""
