"""Token mixers of `ReferenceModel` in float32, from their definitions; they share only shapes and
`RopeConfig` with the engine. Legend: C tokens of a chunk · N positions · E embed · H heads · L rank
of latents · J inputs of a convolution · M its channels · Hk/Hv key and value heads · Dk/Dv their
sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.models.layer_kind import ConvShape, DeltaShape, LatentShape, Recurrence, ScanShape
from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)

_EPS = 1e-6
Cache = tuple[jax.Array, jax.Array]  # keys [N, H, D] and values [N, H, Dv]
# The inputs [J - 1, M] of the convolution, oldest first, and a matrix [Hv, Dv, Dk] a head.
State = tuple[jax.Array, jax.Array]


def reference_rope(rope: RopeConfig | None, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines, one pair at a time in
    float64; 0 columns for None. Sources: Su et al., 2021; Peng et al., 2023 (YaRN); Ding et al.,
    2024 (LongRoPE); for Llama 3.1's and linear scaling and YaRN's ramp, `modeling_rope_utils` of
    transformers."""
    if rope is None:
        return np.empty((max_model_len, 0), np.float32)
    positions = np.arange(max_model_len, dtype=np.float64)
    columns: list[npt.NDArray[np.float64]] = []
    for function in (np.cos, np.sin):
        for pair in range(rope.rotary_dim // 2):
            angles = positions * _radians_per_token(rope, pair, max_model_len)
            columns.append(_magnitude(rope) * function(angles))
    return np.stack(columns, axis=1).astype(np.float32)


def _magnitude(rope: RopeConfig) -> float:
    match rope.scaling:
        case YarnRopeScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case None | LinearRopeScaling() | Llama3RopeScaling() | ProportionalRopeScaling():
            return 1.0


def _radians_per_token(rope: RopeConfig, pair: int, max_model_len: int) -> float:
    frequency = 1.0 / math.pow(rope.theta, 2 * pair / rope.rotary_dim)
    match rope.scaling:
        case None:
            return frequency
        case LinearRopeScaling():
            return frequency / rope.scaling.factor
        case ProportionalRopeScaling():
            return frequency / rope.scaling.factor if pair < rope.scaling.num_pairs else 0.0
        case Llama3RopeScaling():
            return _llama3(frequency, rope.scaling)
        case YarnRopeScaling():
            return _yarn(frequency, pair, rope, rope.scaling)
        case LongRopeScaling():
            if max_model_len <= rope.scaling.original_max_position_embeddings:
                return frequency / rope.scaling.short_factor[pair]
            return frequency / rope.scaling.long_factor[pair]


def _llama3(frequency: float, scaling: Llama3RopeScaling) -> float:
    # Short wavelengths are kept, long ones divided, blended in between.
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    share = original / wavelength - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - share) * frequency / scaling.factor + share * frequency


def _yarn(frequency: float, pair: int, rope: RopeConfig, scaling: YarnRopeScaling) -> float:
    low = _pair_turning(scaling.beta_fast, rope, scaling)
    high = _pair_turning(scaling.beta_slow, rope, scaling)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def _pair_turning(count: float, rope: RopeConfig, scaling: YarnRopeScaling) -> float:
    radians_per_token = 2 * math.pi * count / scaling.original_max_position_embeddings
    return -math.log(radians_per_token, rope.theta) * rope.rotary_dim / 2


def new_latent_cache(shape: LatentShape, context: int) -> Cache:
    keys = (context, shape.num_heads, shape.query_size)
    values = (context, shape.num_heads, shape.value_size)
    return jnp.zeros(keys, jnp.float32), jnp.zeros(values, jnp.float32)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Attention over latents, not absorbed: keys and values of all heads are made."""

    shape: LatentShape
    tensors: dict[str, jax.Array]
    scale: float

    def apply(
        self, x: jax.Array, cache: Cache, start: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """The outputs [C, E] of a chunk at position `start` with its rope factors, and the cache
        with its keys and values."""
        shape, count = self.shape, len(x)
        query = self._query(x).reshape(count, shape.num_heads, shape.query_size)
        plain, rotated = jnp.split(query, [shape.plain_size], axis=-1)
        query = jnp.concatenate([plain, self._rotate(rotated, factors)], axis=-1)
        key, value = self._key_value(x, factors)
        keys = jax.lax.dynamic_update_slice(cache[0], key, (start, 0, 0))
        values = jax.lax.dynamic_update_slice(cache[1], value, (start, 0, 0))
        scores = jnp.einsum("chd,nhd->hcn", query, keys, precision="highest") * self.scale
        ages = start + jnp.arange(count)[:, None] - jnp.arange(len(keys))[None, :]
        weights = jax.nn.softmax(jnp.where(ages >= 0, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("hcn,nhd->chd", weights, values, precision="highest")
        return self._project("o_proj", mixed.reshape(count, -1)), (keys, values)

    def _query(self, x: jax.Array) -> jax.Array:
        if self.shape.query_rank is None:
            return self._project("q_proj", x)
        latent = self._norm("q_a_layernorm", self._project("q_a_proj", x))
        return self._project("q_b_proj", latent)

    def _key_value(self, x: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = self.shape
        both = self._project("kv_a_proj_with_mqa", x)
        latent, rotated = jnp.split(both, [shape.rank], axis=-1)
        made = self._project("kv_b_proj", self._norm("kv_a_layernorm", latent))
        made = made.reshape(len(x), shape.num_heads, shape.plain_size + shape.value_size)
        plain, value = jnp.split(made, [shape.plain_size], axis=-1)
        turned = self._rotate(rotated[:, None], factors)
        wide = jnp.broadcast_to(turned, (len(x), shape.num_heads, shape.rotary_size))
        return jnp.concatenate([plain, wide], axis=-1), value

    def _rotate(self, heads: jax.Array, factors: jax.Array) -> jax.Array:
        half = factors.shape[-1] // 2
        turn = jax.lax.complex(factors[:, :half], factors[:, half:])[:, None, :]
        if not self.shape.pairs_neighbours:
            turned = jax.lax.complex(heads[..., :half], heads[..., half:]) * turn
            return jnp.concatenate([jnp.real(turned), jnp.imag(turned)], axis=-1)
        turned = jax.lax.complex(heads[..., 0::2], heads[..., 1::2]) * turn
        return jnp.stack([jnp.real(turned), jnp.imag(turned)], axis=-1).reshape(heads.shape)

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, self.tensors[f"self_attn.{name}.weight"].T, precision="highest")
        bias = self.tensors.get(f"self_attn.{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + _EPS) * self.tensors[f"self_attn.{name}.weight"]


def new_state(shape: Recurrence) -> State:
    inputs = jnp.zeros((shape.num_inputs - 1, shape.num_channels), jnp.float32)
    sizes = shape.matrices
    if sizes is None:
        return inputs, jnp.zeros((0, 0, 0), jnp.float32)
    matrices = (sizes.num_heads, sizes.value_size, sizes.key_size)
    return inputs, jnp.zeros(matrices, jnp.float32)


class BlockTensors(NamedTuple):
    """The tensors of a layer's block, of all those of the layer by their names in it."""

    layer: Mapping[str, jax.Array]
    name: str

    def tensor(self, name: str) -> jax.Array:
        return self.layer[f"{self.name}.{name}"]

    def rates(self, *, are_stored: bool) -> jax.Array:
        stored = self.tensor("A_log")
        return stored if are_stored else -jnp.exp(stored)

    def project(self, name: str, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, self.tensor(f"{name}.weight").T, precision="highest")
        return y + self.layer.get(f"{self.name}.{name}.bias", 0.0)

    def convolve(
        self, name: str, x: jax.Array, before: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The causal depthwise convolution of x [C, M] after the inputs `before` [J - 1, M], and
        the newest inputs after token `last` []."""
        taps = self.tensor(f"{name}.weight")[:, 0]  # [M, J]
        inputs = jnp.concatenate([before, x])  # [J - 1 + C, M]
        lags = range(taps.shape[1])
        sums = sum(inputs[lag : lag + len(x)] * taps[:, lag] for lag in lags)
        sums = jnp.asarray(sums) + self.layer.get(f"{self.name}.{name}.bias", 0.0)
        return sums, jax.lax.dynamic_slice_in_dim(inputs, last + 1, len(before))


def silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


class DeltaNet(NamedTuple):
    """arXiv 2412.06464."""

    shape: DeltaShape
    block: BlockTensors
    norm_eps: float

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """The output [C, E] for the chunk x [C, E], and the state after token `last` []."""
        shape, count, block = self.shape, len(x), self.block
        sums, kept = block.convolve("conv1d", block.project("in_proj_qkv", x), state[0], last)
        mixed = silu(sums)
        key_width = shape.key_width
        queries = self._keys(mixed[:, :key_width]) * shape.key_size**-0.5
        keys = self._keys(mixed[:, key_width : 2 * key_width])
        values = mixed[:, 2 * key_width :].reshape(count, shape.num_value_heads, -1)
        rates = jnp.log1p(jnp.exp(block.project("in_proj_a", x) + block.tensor("dt_bias")))
        decays = jnp.exp(block.rates(are_stored=shape.has_rates) * rates)  # [C, Hv]
        strengths = 1.0 / (1.0 + jnp.exp(-block.project("in_proj_b", x)))  # [C, Hv]

        def advance(
            matrix: jax.Array, token: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            query, key, value, decay, strength = token
            eye = jnp.eye(shape.key_size, dtype=jnp.float32)
            erase = eye - strength[:, None, None] * key[:, :, None] * key[:, None, :]
            kept = decay[:, None, None] * jnp.matmul(matrix, erase, precision="highest")
            matrix = kept + strength[:, None, None] * value[:, :, None] * key[:, None, :]
            read = jnp.einsum("hvk,hk->hv", matrix, query, precision="highest")
            return matrix, (read, matrix)

        tokens = (queries, keys, values, decays, strengths)
        _, (reads, matrices) = jax.lax.scan(advance, state[1], tokens)
        scale = jnp.sqrt(jnp.mean(jnp.square(reads), axis=-1, keepdims=True) + self.norm_eps)
        gate = block.project("in_proj_z", x).reshape(reads.shape)
        gated = reads / scale * block.tensor("norm.weight") * silu(gate)
        return block.project("out_proj", gated.reshape(count, -1)), (kept, matrices[last])

    def _keys(self, flat: jax.Array) -> jax.Array:
        heads = flat.reshape(len(flat), self.shape.num_key_heads, -1)
        heads = heads / jnp.sqrt(jnp.sum(jnp.square(heads), axis=-1, keepdims=True) + 1e-6)
        indices = jnp.arange(self.shape.num_value_heads)
        if self.shape.is_tiled:
            return heads[:, indices % self.shape.num_key_heads]
        return heads[:, indices * self.shape.num_key_heads // self.shape.num_value_heads]


class ConvNet(NamedTuple):
    """LFM2's."""

    block: BlockTensors

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """The output [C, E] for the chunk x [C, E], and the state after token `last` []."""
        first, gate, third = jnp.split(self.block.project("in_proj", x), 3, axis=-1)
        sums, kept = self.block.convolve("conv", first * third, state[0], last)
        return self.block.project("out_proj", gate * sums), (kept, state[1])


class ScanNet(NamedTuple):
    """Mamba-2, arXiv 2405.21060, as a masked product within a chunk."""

    shape: ScanShape
    block: BlockTensors
    norm_eps: float

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """As `ConvNet.apply`: each token reads what earlier ones of the chunk wrote, and the state
        before it, both decayed."""
        shape, block, count = self.shape, self.block, len(x)
        ends = [shape.value_width, shape.value_width + shape.num_channels]
        gate, mixed, rates = jnp.split(block.project("in_proj", x), ends, axis=-1)
        sums, kept = block.convolve("conv1d", mixed, state[0], last)
        ends = [shape.value_width, shape.value_width + shape.group_width]
        flat, keys, queries = jnp.split(silu(sums), ends, axis=-1)
        values = flat.reshape(count, shape.num_heads, -1)  # [C, Hv, Dv]
        keys, queries = self._of_heads(keys), self._of_heads(queries)  # [C, Hv, Dk]
        rates = jnp.log1p(jnp.exp(rates + block.tensor("dt_bias")))  # [C, Hv]
        ages = jnp.cumsum(
            block.rates(are_stored=shape.has_rates) * rates, axis=0
        )  # [C, Hv]: ln(decay)
        written = values * rates[:, :, None]
        between = ages[:, None] - ages[None]  # [C, C, Hv]: of each token, from each earlier one
        is_earlier = jnp.tril(jnp.ones((count, count), bool))[:, :, None]
        shares = jnp.exp(jnp.where(is_earlier, between, -jnp.inf))
        scores = jnp.einsum("thk,shk->tsh", queries, keys, precision="highest") * shares
        reads = jnp.einsum("tsh,shv->thv", scores, written, precision="highest")
        old = jnp.einsum("hvk,thk->thv", state[1], queries, precision="highest")
        reads += old * jnp.exp(ages)[:, :, None] + block.tensor("D")[:, None] * values
        left = jnp.where(jnp.arange(count)[:, None] <= last, jnp.exp(ages[last] - ages), 0.0)
        new = jnp.einsum("shv,shk->hvk", written * left[:, :, None], keys, precision="highest")
        matrix = state[1] * jnp.exp(ages[last])[:, None, None] + new
        gated = (reads.reshape(count, -1) * silu(gate)).reshape(count, shape.num_groups, -1)
        scale = jnp.sqrt(jnp.mean(jnp.square(gated), axis=-1, keepdims=True) + self.norm_eps)
        normed = (gated / scale).reshape(count, -1) * block.tensor("norm.weight")
        return block.project("out_proj", normed), (kept, matrix)

    def _of_heads(self, flat: jax.Array) -> jax.Array:
        groups = flat.reshape(len(flat), self.shape.num_groups, -1)
        return jnp.repeat(groups, self.shape.num_heads // self.shape.num_groups, axis=1)


def net_of(shape: Recurrence, block: BlockTensors, norm_eps: float) -> DeltaNet | ConvNet | ScanNet:
    match shape:
        case DeltaShape():
            return DeltaNet(shape, block, norm_eps)
        case ConvShape():
            return ConvNet(block)
        case ScanShape():
            return ScanNet(shape, block, norm_eps)
