"""Host logic of continuous batching: stdlib and numpy only; no clock, no threads, no I/O."""
