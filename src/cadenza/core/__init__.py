"""Host side of continuous batching. Uses only stdlib and numpy; no clock, threads or I/O."""
