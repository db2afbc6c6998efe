"""The engine in a process of its own: `EngineProcess` in front, `worker` behind, frames between."""
