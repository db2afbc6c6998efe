"""The IREE backend: a model's step, compiled ahead by `cadenza export`, on IREE's runtime.

It imports neither JAX nor a compiler. The modules lie beside the model's weights, in the folder
`iree`, with a manifest.

Modules:

- `backend`: `IreeBackend`
- `manifest`: what was compiled, for which shapes, by what, and a step's inputs in that layout
- `runner`: the runner, its device and thread, and the checkpoint's tensors as parameters
"""
