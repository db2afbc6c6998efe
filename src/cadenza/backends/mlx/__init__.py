"""The MLX backend: mlx-lm's models on Apple silicon, or on Linux with MLX's CPU or CUDA builds.

Modules:

- `backend`: `MlxBackend`
- `device`: resolves `--device`, and bounds MLX's memory
- `zoo`: mlx-lm's models, imported without its package
- `settings`: settings of config.json under the names that mlx-lm reads
- `slots`: KV and recurrent state of a layer, under the interface of mlx-lm's caches
- `slot_model`: a model over slots: tokens of all slots, or of one
- `step_split`: a step's tokens as calls of a slot model
- `probe`: which calls a model's code allows, found at load time
- `memory`: the memory that a model takes, found without allocating any
- `runner`: the runner, and its thread
- `reference_model`: mlx-lm's own loop over one sequence, for `verify`
- `arrays`: MLX as the arrays in which tokens are chosen
"""
