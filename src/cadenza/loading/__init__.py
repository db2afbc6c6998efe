"""From a model's name and options to a warm engine: plan, memory, and the engine process's program.

Owns the resolution of every `auto` option. Knows no text. Invariant: no weights are loaded before
an `EnginePlan` exists, and a plan fits the available memory.
"""
