"""A model's weights, declared once: name, shape and kind of every tensor.

Owns the tensor names of the supported families. Knows nothing of files or devices: checking a
folder, random checkpoints and loading derive from `declare`. Invariant: a checkpoint that passed
`check_weights` holds exactly the declared tensors, each in its declared shape.

Shapes: E embed, F MLP, Hq/Hkv heads, D head dim, V vocabulary; a linear is [out, in].
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

TensorKind = Literal["embedding", "linear", "norm", "bias"]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llama files store rotary frequencies, which follow from the config."""

_COMPARED_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor, under its name in Hugging Face's layout."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def declare(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the model, in the order of the computation. A tied head is not listed."""
    embed, vocab = config.hidden_size, config.vocab_size
    specs = [TensorSpec(name=EMBEDDING, shape=(vocab, embed), kind="embedding")]
    for layer in range(config.num_layers):
        specs += declare_layer(config, layer)
    specs.append(_norm(FINAL_NORM, embed))
    if not config.tie_word_embeddings:
        specs.append(TensorSpec(name=HEAD, shape=(vocab, embed), kind="linear"))
    return tuple(specs)


def declare_layer(config: ModelConfig, layer: int) -> list[TensorSpec]:
    """The tensors of one decoder layer."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    embed, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    has_bias = config.has_attention_bias
    specs = [_norm(f"{prefix}.input_layernorm.weight", embed)]
    specs += _linear(f"{attention}.q_proj", query, embed, has_bias)  # [Hq * D, E]
    specs += _linear(f"{attention}.k_proj", kv, embed, has_bias)  # [Hkv * D, E]
    specs += _linear(f"{attention}.v_proj", kv, embed, has_bias)  # [Hkv * D, E]
    if config.has_qk_norm:
        specs.append(_norm(f"{attention}.q_norm.weight", config.head_dim))
        specs.append(_norm(f"{attention}.k_norm.weight", config.head_dim))
    specs += _linear(f"{attention}.o_proj", embed, query, has_bias)  # [E, Hq * D]
    specs.append(_norm(f"{prefix}.post_attention_layernorm.weight", embed))
    specs += _linear(f"{mlp}.gate_proj", inner, embed, config.has_mlp_bias)  # [F, E]
    specs += _linear(f"{mlp}.up_proj", inner, embed, config.has_mlp_bias)  # [F, E]
    specs += _linear(f"{mlp}.down_proj", embed, inner, config.has_mlp_bias)  # [E, F]
    return specs


def count_parameters(config: ModelConfig) -> int:
    """Numbers in all tensors; a tied head counts once."""
    return sum(spec.num_elements for spec in declare(config))


def check_weights(config: ModelConfig, weights: Weights) -> None:
    """Compares the files' tensors with the declaration.

    A tied model may store its head too, if that equals the embedding.

    Raises:
        CheckpointError: a tensor is missing, is not part of the model, or has another shape.
    """
    specs = {spec.name: spec for spec in declare(config)}
    missing = [name for name in specs if name not in weights]
    if missing:
        raise CheckpointError(
            f"the weights lack {_name_some(missing)}, which config.json calls for; "
            f"fetch the checkpoint again or correct config.json"
        )
    extra = [name for name in weights if name not in specs and not _IGNORED.fullmatch(name)]
    if config.tie_word_embeddings and HEAD in extra:
        _check_tied_head(weights)
        extra.remove(HEAD)
    if extra:
        raise CheckpointError(
            f"the weights hold {_name_some(extra)}, which config.json does not call for; "
            f"the model would not be computed as it was trained"
        )
    for spec in specs.values():
        _check_shape(spec, weights)


def _check_shape(spec: TensorSpec, weights: Weights) -> None:
    found = weights.entry(spec.name).shape
    if found != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(found)}; config.json calls for "
            f"{list(spec.shape)}; correct config.json or fetch the checkpoint again"
        )


def _check_tied_head(weights: Weights) -> None:
    head, embedding = weights.raw_bytes(HEAD), weights.raw_bytes(EMBEDDING)
    is_equal = weights.entry(HEAD).dtype == weights.entry(EMBEDDING).dtype
    is_equal = is_equal and len(head) == len(embedding)
    for start in range(0, len(head) if is_equal else 0, _COMPARED_BYTES):
        part = slice(start, start + _COMPARED_BYTES)
        is_equal = is_equal and head[part] == embedding[part]
    if not is_equal:
        raise CheckpointError(
            f"config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}; "
            f"set tie_word_embeddings to false or remove the tensor"
        )


def _linear(name: str, num_out: int, num_in: int, has_bias: bool) -> list[TensorSpec]:
    specs = [TensorSpec(name=f"{name}.weight", shape=(num_out, num_in), kind="linear")]
    if has_bias:
        specs.append(TensorSpec(name=f"{name}.bias", shape=(num_out,), kind="bias"))
    return specs


def _norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), kind="norm")


def _name_some(names: list[str]) -> str:
    listed = ", ".join(name[:120] for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more tensors"
