"""Reads quantised weights of folders in the Hugging Face layout: `read_scheme`, `apply_scheme`.

One module a method; each gives a `scheme.QuantisationScheme`. Knows no devices. Invariant: a
setting that changes a weight's value is followed or refused by name.

Modules:

- `scheme`: the interface of a method of quantisation; checked access to a module's tensors
- `methods`: the methods by name, and those that are refused
- `targets`: names and bounded patterns that choose modules
- `grouped`: codes in words and groups
- `compressed_tensors`, `awq`, `gptq`, `mlx`, `float8`: one module a method
- `at_load`: weights that are floats in the file and quantised at load
- `mxfp4`: its values, which two methods store
"""

from cadenza.checkpoint.formats.methods import SETTINGS, apply_scheme, read_scheme
from cadenza.checkpoint.formats.scheme import QuantisationScheme

__all__ = ["SETTINGS", "QuantisationScheme", "apply_scheme", "read_scheme"]
