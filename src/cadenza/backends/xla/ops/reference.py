"""The op table in plain jnp: the definition of each operation. Exact because every step has the
same shape (T tokens, at most 64), so the compiled order of reduction is the same for every batch.
Legend as in `ops.table`; B positions per attention block, G query heads per KV head."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.token_choice import Arrays, TokenChoice, TokenRules
from cadenza.backends.xla.ops.attention_reference import AttentionOps, filled_heads
from cadenza.backends.xla.ops.experts import (
    Gate,
    Routing,
    choose_experts,
    clamped_swiglu,
    expert_biases,
    grouped_gated_linear,
    grouped_linear,
    grouped_product,
    num_experts,
    silu_gate,
)
from cadenza.backends.xla.ops.head_math import rms_norm, soft_cap
from cadenza.backends.xla.ops.quantised import (
    are_codes,
    are_float8,
    as_floats,
    as_operand,
    dequantised_rows,
    float8_product,
    formats_of,
    join_float8,
    orders_of,
    quantise_parts,
    quantised_product,
    stack_codes,
    stack_float8,
)
from cadenza.backends.xla.ops.recurrent import RecurrentOps
from cadenza.backends.xla.ops.table import ExpertChoice, KVPool, Linear, ScaledNorm, StepArrays
from cadenza.batch.step_schema import NO_RULES
from cadenza.batch.token_rules import NONE
from cadenza.errors import ConfigError
from cadenza.models.layer_kind import KVGroup
from cadenza.models.model_config import Activation
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import FLOAT8, WeightFormat, joined

MAX_TOKENS = 64
_HIGHEST = jax.lax.Precision.HIGHEST
_GATES: dict[Activation, Gate] = {
    "silu": silu_gate,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "clamped_swiglu": clamped_swiglu,
}


def _rows_of(shape: tuple[int, int]) -> jax.Array:
    return jnp.arange(shape[0])[:, None]


def _with_spare(shape: tuple[int, int], dtype: Any) -> jax.Array:
    return jnp.zeros((shape[0], shape[1] + 1), dtype)


def _spread(shape: tuple[int, int], dtype: Any, ids: jax.Array, values: Any) -> jax.Array:
    return _with_spare(shape, dtype).at[_rows_of(shape), ids].set(values)[:, :-1]


def _spread_sum(shape: tuple[int, int], dtype: Any, ids: jax.Array, values: Any) -> jax.Array:
    return _with_spare(shape, dtype).at[_rows_of(shape), ids].add(values)[:, :-1]


JAX = Arrays(
    xp=jnp,
    on_device=lambda values: values,
    either=jax.lax.cond,
    repeat=lambda count, body, state: jax.lax.fori_loop(0, count, body, state),
    repeat_while=jax.lax.while_loop,
    set_at=lambda array, indices, values: array.at[indices].set(values),
    spread=_spread,
    spread_sum=_spread_sum,
)
CHOICE = TokenChoice(JAX)
RULES = TokenRules(JAX)


def apply_rules(logits: jax.Array, step: StepArrays, page_size: int) -> jax.Array:
    """Applies each row's rules to logits [L, V]; rows without are bitwise unchanged. A row's
    context is in the token history on the device, one token per KV slot, read through the page
    table."""
    if step.rules is None:
        return logits

    def ruled() -> jax.Array:
        assert step.rules is not None
        records = step.rules.records[step.logits.rule_record]  # [L, W]
        lengths = step.logits.positions  # [L], tokens before the one to choose
        context = _contexts(step, lengths, page_size)  # [L, N]
        changed = RULES.apply(logits, records, context, lengths)
        return jnp.where(has_rules[:, None], changed, logits)

    has_rules = step.logits.rule_record != NO_RULES
    return jax.lax.cond(jnp.any(has_rules), ruled, lambda: logits)


def _contexts(step: StepArrays, lengths: jax.Array, page_size: int) -> jax.Array:
    assert step.rules is not None
    tables = step.page_table[step.logits.rows]  # [L, P]
    positions = jnp.arange(tables.shape[1] * page_size)  # [N]
    is_inside = positions < lengths[:, None]
    pages = jnp.where(is_inside, tables[:, positions // page_size], 0)
    tokens = step.rules.history[pages * page_size + positions % page_size]
    return jnp.where(is_inside, tokens, NONE)


class OpTable(AttentionOps, RecurrentOps):
    """Computes every row and ignores `count`. Weights have the checkpoint's layout; KV is [slots,
    layers, Hkv, D], in int8 with scales [slots, layers, Hkv]."""

    name = "reference"
    is_opaque = False  # XLA may fuse an operation with those around it, and round elsewhere

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """Sizes T to compile programs for, ascending; a single one here. Raises ConfigError above
        `MAX_TOKENS`."""
        if max_num_batched_tokens > MAX_TOKENS:
            raise ConfigError(
                f"--max-num-batched-tokens {max_num_batched_tokens} is above {MAX_TOKENS}, the "
                f"most that stays exact without native kernels; lower it and --max-num-seqs"
            )
        return (max_num_batched_tokens,)

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        """Fuses weights [Ni, K] of linears with the same input along N, in host memory. Here and
        below floats are held in `format`, by default the type of the activations, and a weight of
        codes in its own."""
        format = format or self._spec.weight_format
        all_biases = np.concatenate(bias).astype(np.float32) if len(bias) else None
        num_out = sum(map(len, parts))
        if are_float8(parts):
            return Linear(join_float8(parts), all_biases, FLOAT8, num_out)
        held = as_operand(parts, format)
        if are_codes(held, format):
            codes = quantise_parts(format, held)
            return Linear(codes, all_biases, formats_of(held, format)[0], num_out)
        floats = np.concatenate([as_floats(part) for part in held])
        return Linear(floats.astype(jnp.dtype(format.name)), all_biases, format, num_out)

    def load_gate_up(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        return self.load_linear(parts, bias, format)

    def load_experts(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None = None,
        biases: Sequence[Sequence[npt.NDArray[Any]]] = (),
    ) -> Linear:
        """The weight [E, F] of each expert, or its gate and up [F, E], and the biases of each, if
        any."""
        num_out, bias = sum(map(len, experts[0])), expert_biases(biases)
        if all(are_float8(parts) for parts in experts):
            weight = stack_float8([join_float8(parts) for parts in experts])
            return Linear(weight, bias, FLOAT8, num_out)
        own = format or self._spec.weight_format
        held = as_operand([part for parts in experts for part in parts], own)
        if not are_codes(held, own):
            loaded = [self.load_linear(parts, (), own).weight for parts in experts]
            return Linear(np.stack(loaded), bias, own, num_out)
        coded = [part if isinstance(part, np.ndarray) else part.as_codes() for part in held]
        common, width = joined(formats_of(coded, own)), len(experts[0])
        each = [part if isinstance(part, np.ndarray) else part.in_format(common) for part in coded]
        operands = [each[at : at + width] for at in range(0, len(each), width)]
        codes = [quantise_parts(own, operand) for operand in operands]
        return Linear(stack_codes(codes, orders_of(operands)), bias, common, num_out)

    def new_kv_pool(self, group: KVGroup, num_pages: int, fill: float | None) -> KVPool:
        """Every element `fill` or unwritten; called under tracing."""
        fill = fill or 0.0
        slots = num_pages * self._spec.page_size
        shape = (slots, len(group.layers), group.num_kv_heads, group.head_dim)
        if self._spec.has_kv_codes:
            return KVPool(filled_heads(shape, fill), filled_heads(shape, fill))
        pool = jnp.full(shape, fill, self._spec.dtype)
        values = jnp.full(shape, fill, self._spec.dtype) if group.has_values else None
        return KVPool(pool, values)

    def copy_slots(
        self, pool: KVPool, source: jax.Array, destination: jax.Array, count: int
    ) -> KVPool:
        """In place, all three multiples of `PAGE_SIZE_UNIT`; neither range crosses a page
        boundary."""

        def copy(side: jax.Array) -> jax.Array:
            slots = jax.lax.dynamic_slice_in_dim(side, source, count)
            return jax.lax.dynamic_update_slice_in_dim(side, slots, destination, 0)

        return jax.tree.map(copy, pool)

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        """Residual stream [T, E], float32, scaled by the model's `embedding_scale`."""
        if table.format.is_quantised:
            rows = dequantised_rows(table.weight, step.tokens.ids, self._model.hidden_size)
        else:
            rows = table.weight[step.tokens.ids].astype(jnp.float32)  # [T, E]
        return rows * np.float32(self._model.embedding_scale)

    def embed_for_layers(self, table: Linear, step: StepArrays) -> jax.Array:
        """The rows of the per-layer embedding's table: float32 [T, layers P], times sqrt(P / 2)."""
        inputs = self._model.layer_inputs
        assert inputs is not None, "the model has no per-layer embeddings"
        if table.format.is_quantised:
            width = inputs.size * self._model.num_layers
            rows = dequantised_rows(table.weight, step.tokens.ids, width)
        else:
            rows = table.weight[step.tokens.ids].astype(jnp.float32)
        return rows * np.float32(inputs.embedding_scale)

    def gate_inputs(
        self, x: jax.Array, inputs: jax.Array, layer: int, count: jax.Array
    ) -> jax.Array:
        """activation(x) * the layer's part of `inputs` [T, layers P]: float32 [T, P] to
        activations."""
        first, size = layer * x.shape[1], x.shape[1]
        gated = _GATES[self._model.activation](x, inputs[:, first : first + size])
        return gated.astype(self._spec.dtype)

    def to_activations(self, x: jax.Array, count: jax.Array) -> jax.Array:
        """Casts x [T, E] from float32 to the type of the activations."""
        return x.astype(self._spec.dtype)

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, count: jax.Array, eps: float | None = None
    ) -> jax.Array:
        """x / rms(x) * weight: [·, E] float32 to activations; `eps` is the model's by default."""
        return rms_norm(x, weight, eps or self._model.rms_norm_eps).astype(self._spec.dtype)

    def take_rows(self, x: jax.Array, indices: jax.Array, count: jax.Array) -> jax.Array:
        """The rows of x [T, ·] at int32 indices [N], zeros for negative ones: [N, ·], `count`
        defined."""
        return jnp.where(indices[:, None] >= 0, x[jnp.maximum(indices, 0)], 0)

    def take_logit_rows(self, x: jax.Array, step: StepArrays) -> jax.Array:
        return self.take_rows(x, step.logits.token_indices, step.num_logits)

    def linear(
        self, x: jax.Array, weight: Linear, count: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        """x W, [·, K] to activations [·, N]; with `residual`, float32 residual + the model's
        `residual_scale` * x W."""
        y = _matmul(x, weight)
        if residual is None:
            return y.astype(self._spec.dtype)
        return residual + y * np.float32(self._model.residual_scale)

    def project(
        self, x: jax.Array, weight: Linear, count: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        """scale * x W, [·, K] to float32 [·, N]: a residual stream."""
        y = _matmul(x, weight)
        return y if scale == 1.0 else y * np.float32(scale)

    def norm_add(
        self, x: jax.Array, norm: Any, residual: jax.Array | None, count: jax.Array
    ) -> jax.Array:
        """Float32 `residual`, if any, + rms_norm(x) [·, N], times the factor of a `ScaledNorm`. A
        norm of P values norms each P of the N by themselves."""
        weight, factor = norm if isinstance(norm, ScaledNorm) else (norm, None)
        parts = x if len(weight) == x.shape[1] else x.reshape(len(x), -1, len(weight))
        y = rms_norm(parts, weight, self._model.rms_norm_eps).reshape(x.shape)
        total = y if residual is None else residual + y
        return total if factor is None else total * factor

    def linear_norm_add(
        self, x: jax.Array, weight: Linear, norm: Any, residual: jax.Array, count: jax.Array
    ) -> jax.Array:
        """Float32 `residual` [·, N] + rms_norm(x W), times the factor of a `ScaledNorm`."""
        return self.norm_add(self.project(x, weight, count), norm, residual, count)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        """activation(x Wg) * (x Wu): [T, E] to activations [T, F]."""
        gate, up = jnp.split(_matmul(x, weight), 2, axis=-1)  # [T, F] each
        return self._gate(gate, up)

    def _gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return _GATES[self._model.activation](gate, up).astype(self._spec.dtype)

    def route_experts(
        self,
        x: jax.Array,
        router: Linear,
        count: jax.Array,
        factors: Any | None = None,
        bias: Any | None = None,
    ) -> ExpertChoice:
        """The experts of x [T, E] with the largest router logits, or of a `SigmoidChoice` with its
        `bias` [X]. Their weights include the model's `residual_scale` and the `factors` [X], if
        any."""
        choice = choose_experts(_matmul(x, router), Routing.of(self._model), bias)
        if factors is None:
            return choice
        return choice._replace(weights=choice.weights * jnp.asarray(factors)[choice.ids])

    def gate_expert(self, x: jax.Array, gate: Linear, count: jax.Array) -> ExpertChoice:
        """The only expert for each of x [T, E], weighted by the sigmoid of its linear `gate` [1, E]
        and the model's `residual_scale`."""
        weights = jax.nn.sigmoid(_matmul(x, gate)) * np.float32(self._model.residual_scale)
        return ExpertChoice(jnp.zeros(weights.shape, jnp.int32), weights)

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        gate = _GATES[self._model.activation]
        return grouped_gated_linear(x, weight, choice.ids, gate)

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array | None,
        count: jax.Array,
    ) -> jax.Array:
        """The weighted sum over a token's experts, x [T, A, F], float32 [T, E], plus `residual` if
        given."""
        if residual is None:
            residual = jnp.zeros((len(x), weight.num_out), jnp.float32)
        return grouped_linear(x, weight, choice, residual)

    def head_linear(self, x: jax.Array, weight: Linear, count: jax.Array, width: int) -> jax.Array:
        """The first `width` values of each head of x [T, Hq D] times the head's own weight, of
        `load_experts`: activations [T, Hq N]."""
        heads = num_experts(weight)
        parts = x.reshape(len(x), heads, -1)[..., :width]
        ids = jnp.broadcast_to(jnp.arange(heads), (len(x), heads))
        y = grouped_product(parts, weight, ids)  # [T, Hq, N]
        return y.reshape(len(x), -1).astype(self._spec.dtype)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        """A token for each row of x [L, E]: int32 [L, C]. Logits that are not finite stay, for the
        row state."""
        return self._choose(_matmul(x, head), step)

    def _choose(self, logits: jax.Array, step: StepArrays) -> jax.Array:
        logits = self._shape_logits(logits)
        ruled = apply_rules(logits, step, self._spec.page_size)
        if self._model.placeholder is not None:
            is_placeholder = np.arange(logits.shape[1]) == self._model.placeholder
            ruled = jnp.where(is_placeholder, -np.inf, ruled)
        return CHOICE.choose_tokens(logits, step.logits, ruled)

    def _shape_logits(self, logits: jax.Array) -> jax.Array:
        # Those that are not finite are kept for the row state.
        model = self._model
        if model.logit_divisor != 1.0:
            logits = logits / np.float32(model.logit_divisor)
        if model.logit_soft_cap is None:
            return logits
        return jnp.where(jnp.isfinite(logits), soft_cap(logits, model.logit_soft_cap), logits)


def _matmul(x: jax.Array, weight: Linear) -> jax.Array:
    if weight.format.is_quantised or weight.format == FLOAT8:
        product = quantised_product if weight.format.is_quantised else float8_product
        y = product(x, weight.weight)
        return y if weight.bias is None else y + weight.bias
    y = jax.lax.dot_general(
        x,
        weight.weight,
        (((1,), (1,)), ((), ())),
        precision=_HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y if weight.bias is None else y + weight.bias
