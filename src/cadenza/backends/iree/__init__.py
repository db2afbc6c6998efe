"""The IREE backend: a model's step, compiled ahead by `cadenza export`, on IREE's runtime.

It imports neither JAX nor a compiler. The modules lie beside the model's weights, in the folder
`iree`, with a manifest.

Modules:

- `backend`: `IreeBackend`
- `manifest`: what was compiled, for which shapes, and by what
- `wire`: a step's inputs in the layout that a module was compiled for
- `device`: IREE's devices, their buffers, and modules loaded on them
- `runner`: the runner, its thread, and the checkpoint's tensors as parameters of modules
"""
