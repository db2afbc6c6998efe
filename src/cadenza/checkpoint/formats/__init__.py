"""Reads quantised weights of folders in the Hugging Face layout: `read_scheme`, `apply_scheme`.

One module a method; each gives a `scheme.QuantisationScheme`. Knows no devices. Invariant: a
setting that changes a weight's value is followed or refused by name.
"""

from cadenza.checkpoint.formats.methods import SETTINGS, apply_scheme, read_scheme
from cadenza.checkpoint.formats.scheme import QuantisationScheme

__all__ = ["SETTINGS", "QuantisationScheme", "apply_scheme", "read_scheme"]
