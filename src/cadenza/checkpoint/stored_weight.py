"""`StoredWeight`: a weight that a checkpoint stores quantised, in tensors of other names.

Owns what loading, plans and `info` need of it. Knows no method: `formats/` has a reader for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.checkpoint.quantised_weight import HostWeight
from cadenza.checkpoint.tensor_file import TensorEntry
from cadenza.checkpoint.weight_format import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScheme:
    """How a checkpoint is quantised: the method with its main settings, and the rounding of
    activations that it asks for, None if none.
    """

    name: str
    activations: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight [N, K] and how it is read.

    Args:
        stored_type: the method and the type of the codes, such as "awq int4".
        format: of what `load` gives; None if that is floats.
        parts: the tensors that it is stored in.
        load: reads it; whoever needs the weight holds the result.
    """

    shape: tuple[int, ...]
    stored_type: str
    format: WeightFormat | None
    parts: tuple[TensorEntry, ...]
    load: Callable[[], HostWeight]
