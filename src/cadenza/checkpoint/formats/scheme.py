"""What a method of quantisation says of a checkpoint: `QuantisationScheme`, and checked access to
the tensors of a module: `ModuleTensors`.

Shapes: N out, S stored groups of K. Knows no method.
"""

from dataclasses import dataclass
from typing import Protocol

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.dtypes import StoredDType
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.stored_weight import StoredWeight
from cadenza.checkpoint.tensor_file import AnyArray, TensorEntry
from cadenza.checkpoint.weight_format import GROUP
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

MAX_GROUP = 1 << 20
SCALE_DTYPES: tuple[StoredDType, ...] = ("float16", "bfloat16", "float32")


class QuantisationScheme(Protocol):
    """Which weights of a checkpoint are quantised, and how."""

    @property
    def name(self) -> str:
        """The method and its main settings, for messages and `info`."""
        ...

    @property
    def activations(self) -> str | None:
        """How the checkpoint wants activations rounded; None if it wants them as they are."""
        ...

    def find(self, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        """How the weight `spec` is stored; None if it is not quantised.

        Raises CheckpointError if its tensors are missing, or are not what the settings require.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The stored tensors of one module, such as `model.layers.0.mlp.up_proj`."""

    weights: Weights
    module: str

    @classmethod
    def of(cls, spec: TensorSpec, weights: Weights) -> "ModuleTensors":
        """The tensors beside the weight `spec`."""
        return cls(weights, spec.name.removesuffix(".weight"))

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.weights

    def take(
        self, suffix: str, shapes: list[tuple[int, ...]], dtypes: tuple[StoredDType, ...]
    ) -> TensorEntry:
        """The tensor `suffix`, which has one of `shapes` and one of `dtypes`."""
        name = f"{self.module}.{suffix}"
        if name not in self.weights:
            raise CheckpointError(
                f"the weights lack {name}, which the quantisation of config.json requires; fetch "
                f"the checkpoint again or correct config.json"
            )
        entry = self.weights.entry(name)
        if entry.shape not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"tensor {name} has shape {list(entry.shape)}; the quantisation of config.json "
                f"requires {allowed}; correct config.json or fetch the checkpoint again"
            )
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} has the type {entry.dtype}; the quantisation of config.json "
                f"requires {' or '.join(dtypes)}; correct config.json or fetch the checkpoint again"
            )
        return entry

    def read(self, entry: TensorEntry) -> AnyArray:
        """A view of the stored elements."""
        return self.weights.array(entry.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTensors:
    """The tensors of a module whose last axis is N, as AWQ and GPTQ store them."""

    codes: TensorEntry
    zeros: TensorEntry  # [S, words]
    scales: TensorEntry  # [S, N]

    @classmethod
    def take(
        cls, tensors: ModuleTensors, codes: tuple[int, int], zeros: tuple[int, int], columns: int
    ) -> "ColumnTensors":
        """`qweight` and `qzeros` with the given shapes, and `scales`. Raises `CheckpointError`."""
        return cls(
            codes=tensors.take("qweight", [codes], ("int32",)),
            zeros=tensors.take("qzeros", [zeros], ("int32",)),
            scales=tensors.take("scales", [(zeros[0], columns)], SCALE_DTYPES),
        )


def read_group_size(raw: JsonObject, key: str) -> int | None:
    """The inputs with one scale; None if -1 says all of them. Raises `CheckpointError`."""
    if raw.get(key) == -1:
        return None
    group = raw.integer(key, 1, MAX_GROUP)
    if group % GROUP:
        raise raw.wrong(key, f"-1 or a multiple of {GROUP}")
    return group
