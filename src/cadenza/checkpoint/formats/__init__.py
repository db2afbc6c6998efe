"""Reads quantised weights of folders in the Hugging Face layout.

A method gives a `QuantisationScheme`. Invariant: a setting that changes a value is followed or
refused by name.

Modules:

- `methods`: the methods by name, those that are refused, and weights that are quantised at load
- `scheme`: what a method gives; checked access to a module's tensors; patterns that choose modules
- `grouped`: codes in words and groups, and mxfp4, which three methods store
- `compressed_tensors`, `gptq` (and AWQ), `mlx`, `float8`: the methods
"""

from cadenza.checkpoint.formats.methods import SETTINGS, apply_scheme, read_scheme

__all__ = ["SETTINGS", "apply_scheme", "read_scheme"]
