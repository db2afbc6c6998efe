"""`EngineCore`, its step loop, and the thread-safe `BatchEngine` over it, in this process or in
another. Owns the open requests, their deadlines, and recovery from failed steps. Knows no text,
HTTP or checkpoint. Invariant: an accepted request ends exactly once, even if the engine crashes.
"""
