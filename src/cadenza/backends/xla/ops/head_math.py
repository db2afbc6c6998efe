"""Norms, rotary positions and soft caps in plain jnp: what attention makes of its inputs. Legend as
in `ops.table`."""

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.table import LatentInputs, LatentLayer


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019), in float32."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight


def norm_heads(heads: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` of heads [T, H, D]: over each head, or over all of a token if the weight has H D
    values."""
    if weight.shape[0] == heads.shape[-1]:
        return rms_norm(heads, weight, eps)
    return rms_norm(heads.reshape(len(heads), -1), weight, eps).reshape(heads.shape)


def soft_cap(values: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(values / cap): limits values to [-cap, cap]."""
    return jnp.tanh(values / np.float32(cap)) * np.float32(cap)


def rotate(heads: jax.Array, factors: jax.Array) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of the first rotary_dim values of heads [T, H, D].
    `factors` [T, rotary_dim] holds cosines, then sines; value i pairs with i + rotary_dim / 2."""
    rotary = factors.shape[-1]
    cos, sin = jnp.split(factors[:, None, :], 2, axis=-1)  # [T, 1, rotary_dim / 2]
    first, second = jnp.split(heads[..., :rotary], 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, heads[..., rotary:]]
    return jnp.concatenate(parts, axis=-1)


def latent_heads(
    given: LatentInputs, rotations: jax.Array, norm: jax.Array, layer: LatentLayer
) -> tuple[jax.Array, jax.Array]:
    """Queries [T, 1, Hq, rank + rotary_size] of the only key, and keys [T, 1, rank + rotary_size],
    float32. `rotations` [T, rotary_size] are those of the tokens."""
    shape, count = layer.shape, len(given.keys)
    latent, key = jnp.split(given.keys, [shape.rank], axis=-1)
    absorbed = given.absorbed.reshape(count, shape.num_heads, -1).astype(jnp.float32)
    query = given.queries.reshape(count, shape.num_heads, -1)[..., shape.plain_size :]

    def with_rotated(plain: jax.Array, rotated: jax.Array) -> jax.Array:
        if shape.pairs_neighbours:
            rotated = jnp.concatenate([rotated[..., 0::2], rotated[..., 1::2]], axis=-1)
        return jnp.concatenate([plain, rotate(rotated.astype(jnp.float32), rotations)], axis=-1)

    normed = rms_norm(latent, norm, layer.norm_eps)
    return with_rotated(absorbed, query)[:, None], with_rotated(normed[:, None], key[:, None])
