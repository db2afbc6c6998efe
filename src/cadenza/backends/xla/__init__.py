"""The OpenXLA backend, through JAX: CPU, NVIDIA and TPU. The only package that imports jax.

Modules:

- `backend`: `XlaBackend`, and the count of compiled programs
- `device`: resolves `--device`, and its memory
- `tables`: resolves `--ops`: the op tables, what each needs and what a backend has with it
- `arithmetic`: the class of a step's arithmetic, by name
- `runner`: the runner
- `placement`: on which devices arrays lie, and how programs run there
- `programs`: the compiled programs and the device state
- `compiled_programs`: JAX's cache of them on disk, and what is said where it cannot be used
- `export`: a step as StableHLO, for other compilers
- `span_passes`: spans that attend both ways, a layer and some rows at a time
- `kernel_proof`: compares the bits of a table's kernels on the device, when a model is loaded
- `page_copies`: copies of pages and states to the host and back
- `wire`: splits the uploaded buffer into the step's arrays
- `in_flight`: steps launched and not read; waits for them at close and at exit
- `decoder`: the model, its weights and their loading, over the kinds of `layers`
- `hidden_states`: hidden states that a target's steps keep and an MTP head's steps read
- `reference_model`: the independent implementation
- `reference_recurrences`: its own recurrences
- `reference_latent`, `reference_inputs`, `reference_rope`: its own attention over latents,
  per-layer embeddings and rotary factors
- `reference_tower`, `reference_images`: its own image towers, and what it takes of images
- `mutants`: op tables with faults, for `verify --self-test`
"""
