"""The OpenXLA backend, through JAX: CPU, NVIDIA and TPU. The only package that imports jax.

Modules:

- `backend`: `XlaBackend`, and the count of compiled programs
- `device`: resolves `--device`, and how arrays and programs lie on devices
- `tables`: resolves `--ops`: the op tables, what each needs and what a backend has with it
- `runner`: the runner
- `device_state`: what stays on the device between steps, and functions that change and copy it
- `step_program`: a step, from the uploaded buffer to the tokens
- `programs`: the compiled programs, and JAX's cache of them on disk
- `export`: a step as StableHLO, for other compilers
- `span_passes`: spans that attend both ways, a layer and some rows at a time
- `kernel_proof`: compares the bits of a table's kernels on the device, when a model is loaded
- `in_flight`: steps launched and not read; waits for them at close and at exit
- `decoder`: the model, its weights and their loading, over the kinds of `layers`
- `reference_model`: the independent implementation
- `reference_mixers`: its own recurrences, attention over latents and rotary factors
- `reference_tower`: its own image towers, and what it takes of images
- `mutants`: op tables with faults, for `verify --self-test`
"""
