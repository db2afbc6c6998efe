"""Reads quantised weights of folders in the Hugging Face layout: `read_scheme`, `apply_scheme`.

One module a method; each gives a `QuantisationScheme`. Invariant: a setting that changes a weight's
value is followed or refused by name.

Modules:

- `scheme`: what a method gives, `QuantisationScheme`; checked access to a module's tensors
- `methods`: the methods by name, and those that are refused
- `targets`: names and bounded patterns that choose modules
- `grouped`: codes in words and groups, and mxfp4, which three methods store
- `compressed_tensors`, `awq`, `gptq`, `mlx`, `float8`, `mxfp4`: one module a method
- `at_load`: weights that are floats in the file and quantised at load
"""

from cadenza.checkpoint.formats.methods import SETTINGS, apply_scheme, read_scheme

__all__ = ["SETTINGS", "apply_scheme", "read_scheme"]
