"""Mixtures of experts in plain jnp: the definition of routing and of the grouped products. Every
token is multiplied by every expert and the results are selected afterwards, so that shapes do not
depend on the routing. Legend as in `ops.table`. Slot a of a token is its a-th choice. An id outside
[0, X) adds nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.quantised import float8_product, quantised_product
from cadenza.backends.xla.ops.table import ExpertChoice, Linear
from cadenza.models.model_config import CLAMPED_ALPHA, CLAMPED_LIMIT, ModelConfig, SigmoidChoice
from cadenza.weights.weight_format import FLOAT8

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # of a gate and an up projection of one shape
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the router's logits determine a token's experts and their weights."""

    num_experts: int
    num_chosen: int
    # Whether the weights are divided by the sum of the chosen experts', instead of by all.
    over_chosen: bool
    sigmoid_choice: SigmoidChoice | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        assert model.experts is not None, "the model has no experts"
        return cls(
            num_experts=model.experts.num_experts,
            num_chosen=model.experts.num_chosen,
            over_chosen=model.experts.over_chosen,
            sigmoid_choice=model.experts.sigmoid_choice,
            scale=model.residual_scale * model.experts.weight_scale,
        )


def choose_experts(
    logits: jax.Array, routing: Routing, bias: jax.Array | None = None
) -> ExpertChoice:
    """Ids and weights of the A largest logits [T, X], or of a `SigmoidChoice` with the biases [X],
    in descending order, ties by id. A token whose largest logit is not finite gets the ids 0 to A -
    1 and NaN weights."""
    largest = jnp.max(logits, axis=-1, keepdims=True)  # [T, 1]
    is_sound = jnp.isfinite(largest)
    choice = routing.sigmoid_choice
    if choice is None:
        shares, scores = jnp.exp(logits - largest), logits  # [T, X]
    else:
        shares = jax.nn.sigmoid(logits)
        scores = _in_best_groups(shares if bias is None else shares + bias, choice)
    signless = jnp.where(scores == 0, 0.0, scores)
    _, ids = jax.lax.top_k(signless, routing.num_chosen)
    ids = jnp.where(is_sound, ids, jnp.arange(routing.num_chosen)).astype(jnp.int32)  # [T, A]
    weights = jnp.take_along_axis(shares, ids, axis=-1)  # [T, A]
    if routing.over_chosen or choice is None:
        total = weights if routing.over_chosen else shares
        smallest = 0.0 if choice is None else np.float32(choice.least_sum)
        weights = weights / (jnp.sum(total, axis=-1, keepdims=True) + smallest)
    return ExpertChoice(ids, jnp.where(is_sound, weights * routing.scale, jnp.nan))


def _in_best_groups(scores: jax.Array, choice: SigmoidChoice) -> jax.Array:
    if choice.num_groups == 1:
        return scores
    grouped = scores.reshape(len(scores), choice.num_groups, -1)
    best, _ = jax.lax.top_k(grouped, 2)
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), choice.num_chosen_groups)  # [T, groups]
    is_kept = jnp.any(kept[..., None] == jnp.arange(choice.num_groups), axis=1)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    bounded = jnp.minimum(gate, np.float32(CLAMPED_LIMIT))
    up = jnp.clip(up, -np.float32(CLAMPED_LIMIT), np.float32(CLAMPED_LIMIT))
    return (up + 1) * (bounded * jax.nn.sigmoid(bounded * np.float32(CLAMPED_ALPHA)))


def grouped_product(x: jax.Array, weight: Linear, ids: jax.Array) -> jax.Array:
    """x [T, A or 1, K] times the transposed weight [N, K] of each slot's expert: float32 [T, A, N].
    `weight.weight` is [X, N, K], `weight.bias` [X, N] or None."""

    def body(expert: jax.Array, out: jax.Array) -> jax.Array:
        y = _expert_product(x, weight, expert)
        if weight.bias is not None:
            y = y + weight.bias[expert]
        return jnp.where((ids == expert)[..., None], y, out)

    start = jnp.zeros((*ids.shape, weight.num_out), jnp.float32)
    return jax.lax.fori_loop(0, num_experts(weight), body, start)


def num_experts(weight: Linear) -> int:
    return len(jax.tree.leaves(weight.weight)[0])


def _expert_product(x: jax.Array, weight: Linear, expert: jax.Array) -> jax.Array:
    own = jax.tree.map(lambda each: each[expert], weight.weight)
    if weight.format.is_quantised or weight.format == FLOAT8:
        product = quantised_product if weight.format.is_quantised else float8_product
        y = product(x.reshape(-1, x.shape[-1]), own)
        return y.reshape(*x.shape[:2], -1)
    return jnp.einsum("tak,nk->tan", x, own, precision=_HIGHEST, preferred_element_type=jnp.float32)


def grouped_gated_linear(
    x: jax.Array, weight: Linear, ids: jax.Array, gate_of: Gate = silu_gate
) -> jax.Array:
    """`gate_of` x Wg and x Wu of each slot's expert, x [T, E] to [T, A, F] in x's type.
    `weight.weight` is [X, 2 F, E], gates first, `weight.bias` [X, 2 F] or None."""
    gate, up = jnp.split(grouped_product(x[:, None], weight, ids), 2, axis=-1)  # [T, A, F] each
    return gate_of(gate, up).astype(x.dtype)


def grouped_linear(
    x: jax.Array, weight: Linear, choice: ExpertChoice, residual: jax.Array
) -> jax.Array:
    """`residual` [T, N] plus the weighted sum over a token's slots, in ascending order: x [T, A,
    K], `weight.weight` [X, N, K]; float32 [T, N]."""
    ids, weights = choice
    y = grouped_product(x, weight, ids)  # [T, A, N]
    has_expert = (ids >= 0) & (ids < num_experts(weight))
    total = jnp.zeros_like(residual)
    for slot in range(ids.shape[1]):
        part = weights[:, slot, None] * y[:, slot]
        total = total + jnp.where(has_expert[:, slot, None], part, 0.0)
    return residual + total


def expert_biases(biases: Sequence[Sequence[npt.NDArray[Any]]]) -> npt.NDArray[np.float32] | None:
    if not any(len(parts) for parts in biases):
        return None
    return np.stack([np.concatenate(parts) for parts in biases]).astype(np.float32)
