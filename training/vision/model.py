"""The bundled model that sees as a function of its weights, for training only.

Owns the tower (SigLIP's: layer norms, biases, learned positions, attention over the whole image),
the pixel shuffle and the linear layer behind it, and what is learned beside the text: each image
token says what is at the middle of its cell.  The text model is `training.model`'s.  Knows no
text, files or optimisers.

Shapes: P images, N patches, C cells of an image, E embed of the tower, H its heads, D head dim,
B rows, T tokens of a row, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from training.model import (
    ModelShape,
    Weights,
    init_weights,
    layer_of,
    logits_of,
    matmul,
    rms_norm,
    rows_of,
    run_layer,
)
from training.vision.questions import NUM_PLACES
from training.vision.scenes import COLOURS, KINDS
from training.vision.shape import CELLS_OF_A_SIDE, PATCH, PATCHES_OF_A_SIDE, SCALE, TowerShape

Batch = dict[str, jax.Array]

LABELS = {
    "kinds": 1 + len(KINDS),
    "colours": 1 + len(COLOURS),
    "places": 1 + NUM_PLACES,
    "centres": 2,
}
"""Of each cell, and the number of classes of each."""

SEEING_PARTS = ("tower", "connector_proj", "cells")
"""What image tokens and the labels of cells are computed with."""


def init_seeing(text: ModelShape, tower: TowerShape, key: jax.Array) -> Weights:
    """Random weights of all parts; `cells` is for training only."""
    keys = jax.random.split(key, 4)
    joined = tower.hidden_size * SCALE * SCALE
    return {
        "text": init_weights(text, keys[0]),
        "tower": _init_tower(tower, keys[1]),
        "connector_proj": jax.random.normal(keys[2], (joined, text.hidden_size))
        * (0.1 * joined**-0.5),
        "cells": jax.random.normal(keys[3], (text.hidden_size, sum(LABELS.values()))) * 0.02,
    }


def _init_tower(shape: TowerShape, key: jax.Array) -> Weights:
    embed, mlp, depth = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (embed, embed))
    sizes |= {"fc1_proj": (embed, mlp), "fc2_proj": (mlp, embed)}
    keys = jax.random.split(key, len(sizes) + 2)
    layers: Weights = {}
    for each, (name, size) in zip(keys[2:], sizes.items(), strict=True):
        layers[name] = jax.random.normal(each, (depth, *size)) * size[0] ** -0.5
        layers[name.replace("_proj", "_bias")] = jnp.zeros((depth, size[1]))
    for name in ("o_proj", "fc2_proj"):
        layers[name] *= (2 * depth) ** -0.5
    for name in ("norm1", "norm2"):
        layers[name] = jnp.ones((depth, embed))
        layers[f"{name}_bias"] = jnp.zeros((depth, embed))
    values = 3 * PATCH * PATCH
    return {
        "patch": jax.random.normal(keys[0], (values, embed)) * values**-0.5,
        "patch_bias": jnp.zeros(embed),
        "positions": jax.random.normal(keys[1], (PATCHES_OF_A_SIDE**2, embed)) * 0.1,
        "layers": layers,
        "norm": jnp.ones(embed),
        "norm_bias": jnp.zeros(embed),
    }


def image_tokens(weights: Weights, patches: jax.Array, shape: TowerShape) -> jax.Array:
    """Image tokens `[P, C, E_text]` of bytes of patches `[P, N, 3 PATCH PATCH]`."""
    tower = weights["tower"]
    values = (patches.astype(jnp.float32) / 255 - 0.5) / 0.5
    x = matmul(values, tower["patch"]) + tower["patch_bias"] + tower["positions"]  # [P, N, E]
    for index in range(shape.num_hidden_layers):
        x = _run_tower_layer(x, layer_of(tower, index), shape)
    x = _layer_norm(x, tower["norm"], tower["norm_bias"], shape.layer_norm_eps)
    side, count = CELLS_OF_A_SIDE, x.shape[0]
    x = x.reshape(count, side, SCALE, side, SCALE, -1).transpose(0, 1, 3, 2, 4, 5)
    return matmul(x.reshape(count, side * side, -1), weights["connector_proj"])


def _run_tower_layer(x: jax.Array, weights: Weights, shape: TowerShape) -> jax.Array:
    count, patches, embed = x.shape
    normed = _layer_norm(x, weights["norm1"], weights["norm1_bias"], shape.layer_norm_eps)
    heads = (count, patches, shape.num_attention_heads, -1)
    query, key, value = (
        (matmul(normed, weights[f"{name}_proj"]) + weights[f"{name}_bias"]).reshape(heads)
        for name in "qkv"
    )  # [P, N, H, D]
    scores = jnp.einsum("pnhd,pmhd->phnm", query, key) * (embed // heads[2]) ** -0.5
    mixed = jnp.einsum("phnm,pmhd->pnhd", jax.nn.softmax(scores, axis=-1), value)
    x += matmul(mixed.reshape(x.shape), weights["o_proj"]) + weights["o_bias"]
    normed = _layer_norm(x, weights["norm2"], weights["norm2_bias"], shape.layer_norm_eps)
    hidden = matmul(normed, weights["fc1_proj"]) + weights["fc1_bias"]
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + matmul(hidden, weights["fc2_proj"]) + weights["fc2_bias"]


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * weight + bias


def forward_seeing(
    weights: Weights, batch: Batch, text: ModelShape, tower: TowerShape
) -> tuple[jax.Array, jax.Array]:
    """Logits `[B, T, V]`, and image tokens `[P, C, E_text]`."""
    tokens = image_tokens(weights, batch["patches"], tower)
    model, sources = weights["text"], batch["sources"]
    rows = tokens.reshape(-1, tokens.shape[-1])
    hidden = jnp.where((sources >= 0)[..., None], rows[sources], model["embed"][batch["token_ids"]])
    places = rows_of(text, batch["segments"])
    for index in range(text.num_hidden_layers):
        hidden, _ = run_layer(hidden, layer_of(model, index), places, text)
    hidden = rms_norm(hidden, model["norm"], text.rms_norm_eps)
    return logits_of(model["embed"], hidden), tokens


def losses_of(
    weights: Weights, batch: Batch, text: ModelShape, tower: TowerShape
) -> dict[str, jax.Array]:
    """Mean cross entropies in nats: of the learned tokens (`text`) and of the cells (`cells`);
    and the share of learned tokens that are the likeliest (`matches`)."""
    logits, tokens = forward_seeing(weights, batch, text, tower)
    logits, following = logits[:, :-1], batch["token_ids"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)  # [B, T - 1]
    learned = batch["weights"][:, 1:]
    matches = jnp.argmax(logits, axis=-1) == following
    return {
        "text": jnp.sum(losses * learned) / jnp.sum(learned),
        "cells": _cell_loss(matmul(tokens, weights["cells"]), batch),
        "matches": jnp.sum(matches * learned) / jnp.sum(learned),
    }


def cell_losses(weights: Weights, batch: Batch, tower: TowerShape) -> dict[str, jax.Array]:
    """As `losses_of`, of the cells alone; `weights` needs no more than `SEEING_PARTS`."""
    labels = matmul(image_tokens(weights, batch["patches"], tower), weights["cells"])
    is_thing = batch["kinds"] > 0
    likeliest = jnp.argmax(labels[..., : LABELS["kinds"]], axis=-1)
    matches = (likeliest == batch["kinds"]) & is_thing
    return {
        "cells": _cell_loss(labels, batch),
        "kinds": jnp.sum(matches) / jnp.sum(is_thing),
    }


def _cell_loss(labels: jax.Array, batch: Batch) -> jax.Array:
    """The sum over kinds of labels `[P, C, classes]` of the mean cross entropies."""
    ends = np.cumsum([*LABELS.values()])[:-1].tolist()
    losses = [
        jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[name]))
        for name, logits in zip(LABELS, jnp.split(labels, ends, axis=-1), strict=True)
    ]
    return sum(losses, start=jnp.zeros(()))


def as_batch(arrays: Any) -> Batch:
    """The arrays of an `ImageBatch`, by name."""
    return {name: jnp.asarray(getattr(arrays, name)) for name in arrays.__slots__}
