"""A model's step compiled ahead, for a server that loads no JAX: `cadenza export`.

The only package that knows two backends: `backends.xla` writes a step as StableHLO, and
`backends.iree` runs what IREE's compiler makes of it.

Modules:

- `export`: from a model to modules: IREE's compiler, and the parameters by their contents
- `folder`: the folder, with weights in the order of the parameters
"""
