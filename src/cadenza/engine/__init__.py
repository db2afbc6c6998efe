"""EngineCore, its step loop, and the thread-safe seam over it, in this process or another. Owns who
is open, for how long, and what happens when a step fails. Never sees text, HTTP or a checkpoint.
Invariant: an accepted request ends once, whatever dies.
"""
