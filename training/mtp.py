"""The MTP layer (multi-token prediction) of the bundled model as a function of its weights.

Owns its initial weights and its forward pass, which is that of `mtp.*` beside a Qwen3 (the layout
`QWEN_MTP` of `models/mtp_layout.py`): embedding and hidden state are normed and joined, in this
order, the hidden state is the one after the target's final norm, norms do not add one, and the head
is the target's.  For every further draft the layer reads its own output after its norm.

Invariant: at depth d a token is computed from the same keys as in the engine, where the nearest
d - 1 tokens are drafts.

Shapes: B rows, T tokens of a row, E embed.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from training.batches import NO_SEGMENT
from training.model import (
    KeysValues,
    ModelShape,
    Weights,
    layer_of,
    matmul,
    rms_norm,
    rows_of,
    run_layer,
)

FIRST_OF_ITS_SEGMENT = -1
"""The segment of tokens without one before them: the layer has no input for these."""

assert FIRST_OF_ITS_SEGMENT != NO_SEGMENT


def init_mtp(target: Weights, key: jax.Array) -> Weights:
    """Weights that start from the target's last layer and final norm."""
    embed = target["norm"].shape[0]
    return {
        "input_proj": jax.random.normal(key, (2 * embed, embed)) * (2 * embed) ** -0.5,
        "embedding_norm": jnp.ones(embed),
        "hidden_norm": jnp.ones(embed),
        "layers": {name: jnp.array(stack[-1:]) for name, stack in target["layers"].items()},
        "norm": jnp.array(target["norm"]),
    }


def mtp_states(
    weights: Weights,
    embedded: jax.Array,
    hidden: jax.Array,
    segments: jax.Array,
    *,
    shape: ModelShape,
) -> Iterator[jax.Array]:
    """The layer's outputs `[B, T, E]` after its norm, one for each depth, without end.

    `embedded` are the tokens' embeddings, and `hidden` the target's states after its final norm.
    At depth d the output in a token's place predicts the next token from the tokens so far, and
    from hidden states up to that of d tokens before; the first d tokens of a segment have none.
    """
    layer = layer_of(weights, 0)
    rows = rows_of(shape, _without_first(segments))
    embedded = rms_norm(embedded, weights["embedding_norm"], shape.rms_norm_eps)
    calls: list[KeysValues] = []
    while True:
        before = jnp.roll(hidden, 1, axis=1)
        before = rms_norm(before, weights["hidden_norm"], shape.rms_norm_eps)
        x = matmul(jnp.concatenate([embedded, before], axis=-1), weights["input_proj"])
        x, own = run_layer(x, layer, rows, shape, calls)
        calls.append(own)
        hidden = rms_norm(x, weights["norm"], shape.rms_norm_eps)
        yield hidden


def has_tokens_before(segments: jax.Array, count: int) -> jax.Array:
    """Whether `count` tokens of its segment are before a token, `[B, T]`."""
    places = jnp.arange(segments.shape[1])
    return (jnp.roll(segments, count, axis=1) == segments) & (places >= count)


def _without_first(segments: jax.Array) -> jax.Array:
    return jnp.where(has_tokens_before(segments, 1), segments, FIRST_OF_ITS_SEGMENT)
