"""`WeightSource`: the tensors of a checkpoint, loaded in the layouts of an op table. `models`
declares their names and which are fused. A norm that multiplies by 1 + weight gets its 1 here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, ScaledNorm
from cadenza.errors import CheckpointError
from cadenza.models.host_math import exp
from cadenza.models.layer_kind import DeltaShape, ScanShape
from cadenza.weights.quantised_weight import Float8Weight, HostWeight, have_one_order
from cadenza.weights.tensor_spec import (
    LayerSpec,
    LinearSpec,
    OperandSpec,
    PatchSpec,
    SpecTree,
    TensorSpec,
)
from cadenza.weights.weight_format import WeightFormat
from cadenza.weights.weights import Weights

Node = TypeVar("Node", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors, and the op table that they are loaded for."""

    ops: OpTable
    spec: DecoderSpec
    weights: Weights

    def linear(self, *linears: LinearSpec) -> Linear:
        operand, biases = self.operand(linears), self.biases(linears)
        return self.ops.load_linear(operand, biases, self.format_of(linears))

    def norm(self, name: str) -> npt.NDArray[np.float32]:
        weight = np.asarray(self.weights[name]).astype(np.float32)
        return weight + np.float32(1.0) if self.spec.model.norm_adds_one else weight

    def load(self, kind: type[Node], spec: Any, **own: Any) -> Node:
        """The weights of a node of a declared tree: those in `own`, and of each other field the
        spec's of the same name. Files of packed weights keep the order in which linears are
        loaded."""
        fields: tuple[str, ...] = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
        others = {each: self.leaf(getattr(spec, each)) for each in fields if each not in own}
        return kind(**own, **others)

    def leaf(self, spec: SpecTree) -> Any:
        match spec:
            case None:
                return None
            case LinearSpec():
                return self.linear(spec)
            case OperandSpec():
                return self.linear(*spec.linears)
            case PatchSpec():
                return self._patch(spec)
            case TensorSpec(kind="norm"):
                return self.norm(spec.name)
            case TensorSpec(kind="filter"):
                return self.filters(spec)
            case TensorSpec(kind="decay"):
                return self.decay(spec)
            case TensorSpec():
                return self.scale(spec)
            case tuple():
                parts = [self.leaf(each) for each in spec]
                return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)

    def _patch(self, spec: PatchSpec) -> Linear:
        stored = np.asarray(self.weights[spec.weight.name])
        bias = [] if spec.bias is None else [self.weights[spec.bias.name]]
        return self.ops.load_linear([stored.reshape(len(stored), -1)], bias)

    def post_norm(self, layer: LayerSpec) -> Any | None:
        """With the layer's scale if nothing follows it."""
        return self.closing_norm(layer.mlp_post_norm, None if layer.inputs else layer.scale)

    def closing_norm(self, spec: TensorSpec | None, scale: TensorSpec | None) -> Any | None:
        """With the layer's scale if it has one."""
        norm = self.leaf(spec)
        if scale is None:
            return norm
        assert norm is not None, "a layer with a scale norms its last output"
        return ScaledNorm(norm, self.scale(scale))

    def scale(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        return np.asarray(self.weights[spec.name]).astype(np.float32)

    def filters(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(self.scale(spec)[:, 0].T)

    def decay(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        """The rates of a recurrence, which are negative, with the same bits on every machine."""
        stored, shape = self.scale(spec), self.spec.model.recurrence
        assert isinstance(shape, DeltaShape | ScanShape), "the model has decays"
        if shape.has_rates:
            return stored
        return np.array([-exp(float(each)) for each in stored], np.float32)

    def row_parts(self, linear: LinearSpec, sizes: Sequence[int]) -> list[Linear]:
        """A linear as several, of `sizes` consecutive rows."""
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

    def gate_up(self, spec: OperandSpec) -> Linear:
        biases, format = self.biases(spec.linears), self.format_of(spec.linears)
        if len(biases) == 1:
            biases = np.split(biases[0], 2)
        return self.ops.load_gate_up(self.gate_and_up(spec), biases, format)

    def gate_and_up(self, spec: OperandSpec) -> tuple[HostWeight, HostWeight]:
        first, *others = self.operand(spec.linears)
        if others:
            return first, others[0]
        half = len(first) // 2
        return rows_of(first, 0, half), rows_of(first, half, len(first))

    def table(self, spec: TensorSpec) -> Linear:
        return self.ops.load_linear([self.weights[spec.name]], [], self.spec.format_of(spec))

    def format_of(self, linears: Sequence[LinearSpec]) -> WeightFormat:
        return self.spec.format_of(linears[0].weight_spec)

    def biases(self, linears: Sequence[LinearSpec]) -> list[npt.NDArray[Any]]:
        return [self.weights[linear.bias] for linear in linears if linear.bias is not None]

    def operand(self, linears: Sequence[LinearSpec]) -> tuple[HostWeight, ...]:
        """Raises CheckpointError if codes have their inputs in different orders."""
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
