"""`WeightSource`: the tensors of a checkpoint, loaded in the layouts of an op table.

`checkpoint.declaration` gives the tensor names and which tensors are fused into one operand. For a
norm that multiplies by 1 + weight, the 1 is added here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, ScaledNorm
from cadenza.checkpoint.float8_weight import Float8Weight
from cadenza.checkpoint.host_math import exp
from cadenza.checkpoint.layer_kind import DeltaShape, ScanShape
from cadenza.checkpoint.quantised_weight import HostWeight, have_one_order
from cadenza.checkpoint.tensor_spec import GatedMLPSpec, LinearSpec, TensorSpec
from cadenza.checkpoint.weight_format import WeightFormat
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors, and the op table that they are loaded for."""

    ops: OpTable
    spec: DecoderSpec
    weights: Weights

    def linear(self, *linears: LinearSpec) -> Linear:
        """Linears with the same input, fused into one."""
        operand, biases = self.operand(linears), self.biases(linears)
        return self.ops.load_linear(operand, biases, self.format_of(linears))

    def norm(self, name: str) -> npt.NDArray[np.float32]:
        weight = np.asarray(self.weights[name]).astype(np.float32)
        return weight + np.float32(1.0) if self.spec.model.norm_adds_one else weight

    def optional_norm(self, spec: TensorSpec | None) -> npt.NDArray[np.float32] | None:
        return None if spec is None else self.norm(spec.name)

    def closing_norm(self, spec: TensorSpec | None, scale: TensorSpec | None) -> Any | None:
        """The norm of the last output of a layer, with the layer's scale if it has one."""
        norm = self.optional_norm(spec)
        if scale is None:
            return norm
        assert norm is not None, "a layer with a scale norms its last output"
        return ScaledNorm(norm, self.scale(scale))

    def scale(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        """A tensor in float32, as it is stored."""
        return np.asarray(self.weights[spec.name]).astype(np.float32)

    def filters(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        """Of a depthwise convolution [M, 1, J], as [J, M]."""
        return np.ascontiguousarray(self.scale(spec)[:, 0].T)

    def decay(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        """The rates of a recurrence, which are negative, with the same bits on every machine."""
        stored, shape = self.scale(spec), self.spec.model.recurrence
        assert isinstance(shape, DeltaShape | ScanShape), "the model has decays"
        if shape.has_rates:
            return stored
        return np.array([-exp(float(each)) for each in stored], np.float32)

    def optional_scale(self, spec: TensorSpec | None) -> npt.NDArray[np.float32] | None:
        return None if spec is None else self.scale(spec)

    def row_parts(self, linear: LinearSpec, sizes: Sequence[int]) -> list[Linear]:
        """A linear as several, of consecutive rows; `sizes` are their numbers of rows."""
        (whole,), biases, format = (
            self.operand([linear]),
            self.biases([linear]),
            self.format_of([linear]),
        )
        parts: list[Linear] = []
        start = 0
        for size in sizes:
            stop = start + size
            own = [bias[start:stop] for bias in biases]
            parts.append(self.ops.load_linear([rows_of(whole, start, stop)], own, format))
            start = stop
        return parts

    def gate_up(self, mlp: GatedMLPSpec) -> tuple[HostWeight, HostWeight]:
        """Gate and up, from two tensors or from the halves of a fused one."""
        first, *others = self.operand(mlp.gate_up)
        if others:
            return first, others[0]
        half = len(first) // 2
        return rows_of(first, 0, half), rows_of(first, half, len(first))

    def table(self, spec: TensorSpec) -> Linear:
        """The embedding table or the head [V, E]."""
        return self.ops.load_linear([self.weights[spec.name]], [], self.spec.format_of(spec))

    def format_of(self, linears: Sequence[LinearSpec]) -> WeightFormat:
        """The format of linears that are loaded together."""
        return self.spec.format_of(linears[0].weight_spec)

    def biases(self, linears: Sequence[LinearSpec]) -> list[npt.NDArray[Any]]:
        return [self.weights[linear.bias] for linear in linears if linear.bias is not None]

    def operand(self, linears: Sequence[LinearSpec]) -> tuple[HostWeight, ...]:
        """The weights of linears that are multiplied as one.

        Raises CheckpointError if their codes have the inputs in different orders.
        """
        parts = tuple(self.weights[linear.weight] for linear in linears)
        coded = [part for part in parts if not isinstance(part, np.ndarray | Float8Weight)]
        if len(coded) == len(parts) and not have_one_order(coded):
            names = ", ".join(linear.name for linear in linears)
            raise CheckpointError(
                f"the groups (g_idx) of {names} have the inputs in different orders, but these "
                f"linears are computed as one; use a checkpoint with desc_act false"
            )
        return parts


def rows_of(part: HostWeight, start: int, stop: int) -> HostWeight:
    """Rows [start, stop) of a weight, without a copy."""
    return part[start:stop] if isinstance(part, np.ndarray) else part.rows(start, stop)
