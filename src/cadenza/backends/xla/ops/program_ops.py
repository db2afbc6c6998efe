"""The operations of a step as words of a program: operands and attributes as `csrc/ffi/` defines
them. Legend as in `ops.table`."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.token_choice import NUM_COLUMNS
from cadenza.backends.xla.ops.experts import Routing, expert_biases
from cadenza.backends.xla.ops.native_program import array_of
from cadenza.backends.xla.ops.program_mixers import ProgramMixerOps
from cadenza.backends.xla.ops.table import DecoderSpec, ExpertChoice, Linear, ScaledNorm, StepArrays
from cadenza.batch.step_schema import LogitInputs, specs_of
from cadenza.kernel_proof import ProvenProduct
from cadenza.models.model_config import Activation
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import WeightFormat

_CODE_OF_ACTIVATION: dict[Activation, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "clamped_swiglu": 3,
}
_NO_CAP = 0.0
_NO_TOKEN = -1


class _TableRows(NamedTuple):
    vocab: int
    width: int
    scale: float


class Product(NamedTuple):
    """A product of activations of type `x_dtype`, [·, k], with a weight on the device; `n` columns,
    or half of them each for gate and up."""

    weight: jax.Array
    n: int
    k: int
    is_gated: bool
    x_dtype: np.dtype[Any]


class ProgramOps(ProgramMixerOps):
    """Records operations; tables differ in their library and in the layouts of weights. Exact by
    construction: a kernel's order of reduction does not depend on the batch, and padding is not
    read, so every bucket gives the same bits."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        self._activation = _CODE_OF_ACTIVATION[spec.model.activation]

    def prove_products(
        self,
        products: Sequence[Product],  # noqa: ARG002 (nothing chooses among kernels)
        rows: Sequence[int],  # noqa: ARG002
    ) -> tuple[ProvenProduct, ...]:
        """Decides which kernel computes each product in steps of so many rows. Raises ConfigError
        with the shape of a product that has other bits in some step."""
        return ()

    @abstractmethod
    def _hold(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        """The weights [X, ...] of experts with equal parts, in the table's layout; no biases."""

    def _placed(self, weight: npt.NDArray[Any]) -> Any:
        # Where a held weight stays until the runner takes all of them.
        return weight

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        held = self._hold([parts], format)
        all_biases = np.concatenate(bias).astype(np.float32) if len(bias) else None
        return replace(held, weight=self._placed(held.weight[0]), bias=all_biases)

    def load_gate_up(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        held = self._hold([parts], format, is_gated=True)
        both = np.stack(bias).astype(np.float32) if len(bias) else None
        return replace(held, weight=self._placed(held.weight[0]), bias=both)

    def load_experts(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None = None,
        biases: Sequence[Sequence[npt.NDArray[Any]]] = (),
    ) -> Linear:
        held = self._hold(experts, format, is_gated=len(experts[0]) == 2)
        return replace(held, weight=self._placed(held.weight), bias=expert_biases(biases))

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        model = self._model
        rows = _TableRows(model.vocab_size, model.hidden_size, model.embedding_scale)
        return self._embed(table, step, rows)

    def embed_for_layers(self, table: Linear, step: StepArrays) -> jax.Array:
        inputs = self._model.layer_inputs
        assert inputs is not None, "the model has no per-layer embeddings"
        width = self._model.num_layers * inputs.size
        return self._embed(
            table, step, _TableRows(inputs.vocab_size, width, inputs.embedding_scale)
        )

    def _embed(self, table: Linear, step: StepArrays, rows: "_TableRows") -> jax.Array:
        shape = (len(step.tokens.ids), rows.width)
        return self._call("embed", array_of(shape, jnp.float32))(
            *(step.tokens.ids, table.weight, step.num_tokens),
            vocab=rows.vocab,
            scale=np.float32(rows.scale),
        )

    def gate_inputs(
        self, x: jax.Array, inputs: jax.Array, layer: int, count: jax.Array
    ) -> jax.Array:
        return self._call("gate_inputs", array_of(x.shape, self._spec.dtype))(
            *(x, inputs, count), first=layer * x.shape[1], activation=self._activation
        )

    def to_activations(self, x: jax.Array, count: jax.Array) -> jax.Array:
        if self._spec.dtype == jnp.float32:
            return x
        return self._call("convert", array_of(x.shape, self._spec.dtype))(x, count)

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, count: jax.Array, eps: float | None = None
    ) -> jax.Array:
        return self._call("rms_norm", array_of(x.shape, self._spec.dtype))(
            x, weight, count, eps=np.float32(eps or self._model.rms_norm_eps)
        )

    def take_rows(self, x: jax.Array, indices: jax.Array, count: jax.Array) -> jax.Array:
        result = array_of((len(indices), x.shape[1]), x.dtype)
        return self._call("take_rows", result)(x, count, indices)

    def linear(
        self, x: jax.Array, weight: Linear, count: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        if residual is None:
            return self._product(x, weight, count, (self._spec.dtype, 1.0))
        call = self._call("linear", array_of(residual.shape, jnp.float32), {4: 0})
        scale = np.float32(self._model.residual_scale)
        return call(x, weight.weight, count, weight.bias, residual, scale=scale)

    def project(
        self, x: jax.Array, weight: Linear, count: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        return self._product(x, weight, count, (jnp.float32, scale))

    def _product(
        self, x: jax.Array, weight: Linear, count: jax.Array, result: tuple[Any, float]
    ) -> jax.Array:
        dtype, scale = result
        call = self._call("linear", array_of((len(x), weight.num_out), dtype))
        return call(x, weight.weight, count, weight.bias, None, scale=np.float32(scale))

    def norm_add(
        self, x: jax.Array, norm: Any, residual: jax.Array | None, count: jax.Array
    ) -> jax.Array:
        weight, factor = norm if isinstance(norm, ScaledNorm) else (norm, None)
        reused = None if residual is None else {3: 0}
        call = self._call("rms_norm_add", array_of(x.shape, jnp.float32), reused)
        eps = np.float32(self._model.rms_norm_eps)
        return call(x, weight, count, residual, factor, eps=eps)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        call = self._call("gated_linear", array_of((len(x), weight.num_out // 2), self._spec.dtype))
        return call(x, weight.weight, count, weight.bias, activation=self._activation)

    def route_experts(
        self,
        x: jax.Array,
        router: Linear,
        count: jax.Array,
        factors: Any | None = None,
        bias: Any | None = None,
    ) -> ExpertChoice:
        routing = Routing.of(self._model)
        choice = routing.sigmoid_choice
        return self._routed(
            *(routing.num_chosen, x, router.weight, count, router.bias, factors, bias),
            experts=routing.num_experts,
            over_chosen=routing.over_chosen,
            sigmoid=choice is not None,
            groups=1 if choice is None else choice.num_groups,
            chosen_groups=1 if choice is None else choice.num_chosen_groups,
            scale=np.float32(routing.scale),
            least_sum=np.float32(0.0 if choice is None else choice.least_sum),
        )

    def gate_expert(self, x: jax.Array, gate: Linear, count: jax.Array) -> ExpertChoice:
        return self._routed(
            *(1, x, gate.weight, count, None, None, None),
            experts=1,
            over_chosen=False,
            sigmoid=True,
            groups=1,
            chosen_groups=1,
            scale=np.float32(self._model.residual_scale),
            least_sum=np.float32(0.0),
        )

    def _routed(
        self, num_chosen: int, x: jax.Array, *operands: Any, **attributes: Any
    ) -> ExpertChoice:
        shape = (len(x), num_chosen)
        results = array_of(shape, jnp.int32), array_of(shape, jnp.float32)
        return ExpertChoice(*self._call("route_experts", results)(x, *operands, **attributes))

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        shape = (*choice.ids.shape, weight.num_out // 2)
        call = self._call("grouped_gated_linear", array_of(shape, self._spec.dtype))
        return call(x, weight.weight, count, weight.bias, choice.ids, activation=self._activation)

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array | None,
        count: jax.Array,
    ) -> jax.Array:
        result = array_of((len(x), weight.num_out), jnp.float32)
        call = self._call("grouped_linear", result, None if residual is None else {4: 0})
        return call(x, weight.weight, count, weight.bias, residual, *choice)

    def head_linear(self, x: jax.Array, weight: Linear, count: jax.Array, width: int) -> jax.Array:
        shape = (len(x), weight.weight.shape[0] * weight.num_out)
        return self._call("head_linear", array_of(shape, self._spec.dtype))(
            x, weight.weight, count, width=width
        )

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._call("next_token", array_of((len(x), NUM_COLUMNS), jnp.int32))(
            *(x, head.weight, step.num_logits, _columns(step.logits), *_memory(step)),
            vocab=self._model.vocab_size,
            divisor=np.float32(self._model.logit_divisor),
            soft_cap=np.float32(self._model.logit_soft_cap or _NO_CAP),
            page_size=self._spec.page_size,
            banned=_NO_TOKEN if self._model.placeholder is None else self._model.placeholder,
        )


def _columns(logits: LogitInputs[jax.Array]) -> jax.Array:
    parts = [
        jax.lax.bitcast_convert_type(getattr(logits, spec.name), jnp.int32)
        .reshape(-1, spec.columns)
        .T
        for spec in specs_of(LogitInputs)
    ]
    return jnp.concatenate(parts)


def _memory(step: StepArrays) -> tuple[jax.Array | None, ...]:
    if step.rules is None:
        return (None,) * 3
    return step.rules.records, step.page_table, step.rules.history
