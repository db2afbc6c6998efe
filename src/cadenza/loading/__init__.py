"""From a model's name and options to a warm engine: plans, memory, and the engine process's
program. Owns the resolving of every `auto`. Never sees text. Invariant: nothing heavy is loaded
before a plan exists, and a plan that exists fits its memory.
"""
