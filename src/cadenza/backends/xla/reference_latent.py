"""Attention over latents of `ReferenceModel`, not absorbed: keys and values of all heads are made.
Legend: C tokens of a chunk · N positions of the context · H heads · L rank of the latents."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cadenza.models.layer_kind import LatentShape

_EPS = 1e-6

Cache = tuple[jax.Array, jax.Array]  # keys [N, H, D] and values [N, H, Dv]


def new_latent_cache(shape: LatentShape, context: int) -> Cache:
    keys = (context, shape.num_heads, shape.query_size)
    values = (context, shape.num_heads, shape.value_size)
    return jnp.zeros(keys, jnp.float32), jnp.zeros(values, jnp.float32)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The attention of one layer, whose tensors are named as in the checkpoint."""

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
