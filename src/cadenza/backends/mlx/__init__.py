"""The MLX backend: mlx-lm's models on Apple silicon, or on Linux with MLX's CPU or CUDA builds.

Modules:

- `backend`: `MlxBackend`
- `device`: resolves `--device`, and bounds MLX's memory
- `zoo`: mlx-lm's models and settings, imported without its package, and its own loop for `verify`
- `slots`: KV and recurrent state of a layer, under the interface of mlx-lm's caches
- `slot_model`: a model over slots: tokens of all slots, or of one, and a step as calls of it
- `probe`: which calls a model's code allows, and the memory that it takes, found at load time
- `runner`: the runner, and its thread
- `arrays`: MLX as the arrays in which tokens are chosen
"""
