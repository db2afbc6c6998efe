"""Attention over latents in GGUF (llama.cpp's `deepseek2`: conversion/deepseek.py,
src/models/deepseek2.cpp), written as attention of one KV head. The linears of keys and values of a
latent are stored apart: `attn_k_b` [Hq, rank, plain] is transposed, `attn_v_b` [Hq, value, rank] is
not; older files have both in `attn_kv_b`, as the Hugging Face layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.gguf.settings import Settings
from cadenza.models.layer_kind import LatentShape
from cadenza.models.model_config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_WIDTH
from cadenza.models.rope_config import RopeConfig, YarnRopeScaling, format_rope
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec

LATENT_KEYS = frozenset(
    "attention.q_lora_rank attention.key_length_mla attention.value_length_mla expert_gating_func "
    "expert_weights_scale expert_group_count expert_group_used_count nextn_predict_layers "
    "rope.scaling.yarn_log_multiplier".split()
)
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_QUERY_RANK = "attention.q_lora_rank"
_OF_KEYS, _OF_VALUES = ".of_keys", ".of_values"


def read_latents(settings: Settings, rope: RopeConfig) -> dict[str, object]:
    """The entries of config.json that no single key has. Raises CheckpointError."""
    settings.require("rope.dimension_count")
    plain = _length(settings, "attention.key_length") - rope.rotary_dim
    if plain < 1:
        raise settings.wrong("attention.key_length_mla", f"above {rope.rotary_dim}")
    has_rank = settings.has(_QUERY_RANK)
    return {
        "num_key_value_heads": settings.num_heads,
        "head_dim": rope.rotary_dim,
        "q_lora_rank": settings.integer(_QUERY_RANK, 1, MAX_WIDTH) if has_rank else None,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rope.rotary_dim,
        "v_head_dim": _length(settings, "attention.value_length"),
        "rope_parameters": format_rope(_with_magnitude(settings, rope), rope.rotary_dim),
        **_read_choice(settings),
    }


def _length(settings: Settings, key: str) -> int:
    """Of a head's key or value; files with `_mla` have the absorbed one under `key`."""
    stated = f"{key}_mla" if settings.has(f"{key}_mla") else key
    return settings.integer(stated, 1, MAX_HEAD_DIM)


def _with_magnitude(settings: Settings, rope: RopeConfig) -> RopeConfig:
    """llama.cpp multiplies scores, and not cosines and sines, by the magnitude of YaRN."""
    if not isinstance(rope.scaling, YarnRopeScaling):
        return rope
    settings.require(_LOG_MULTIPLIER, "rope.scaling.original_context_length")
    multiplier = settings.number(_LOG_MULTIPLIER, 0.0, 1e3)
    mscale = float(np.format_float_positional(np.float32(multiplier * 10)))
    scaling = replace(rope.scaling, attention_factor=1.0, mscale_all_dim=mscale)
    return replace(rope, scaling=scaling)


def _read_choice(settings: Settings) -> dict[str, object]:
    """Files of GLM-4.7-Flash name no gating; biases of the choice go with sigmoids."""
    if not any(name.endswith(".exp_probs_b.bias") for name in settings.tensors):
        settings.require("expert_gating_func")
    settings.require("expert_group_count", "expert_weights_scale")
    num_groups = settings.integer("expert_group_count", 0, MAX_EXPERTS) or 1
    if num_groups > 1:
        settings.require("expert_group_used_count")
    num_chosen = settings.integer("expert_group_used_count", 0, num_groups, num_groups)
    return {
        "n_group": num_groups,
        "topk_group": num_chosen or num_groups,
        "routed_scaling_factor": settings.number("expert_weights_scale", 0.0, 1e6) or 1.0,
    }


def latent_parts(
    shape: LatentShape, both: TensorSpec
) -> Iterator[tuple[str, tuple[int, ...], TensorSpec]]:
    """A layer's linears of keys and values that are stored apart: name, shape and tensor."""
    for name, suffix, rows, width in (
        ("attn_k_b", _OF_KEYS, shape.rank, shape.plain_size),
        ("attn_v_b", _OF_VALUES, shape.value_size, shape.rank),
    ):
        own = (shape.num_heads * rows, width)
        part = TensorSpec(name=both.name + suffix, shape=own, kind="linear")
        yield f"{name}.weight", (shape.num_heads, rows, width), part


def join_latents(
    shape: LatentShape, tensors: Mapping[str, StoredTensor | StoredWeight]
) -> dict[str, StoredTensor | StoredWeight]:
    """The tensors, with the linears of keys and values that are stored apart as one in floats."""
    joined = dict(tensors)
    for name in [each for each in tensors if each.endswith(_OF_KEYS)]:
        own = name.removesuffix(_OF_KEYS)
        keys, values = joined.pop(name), joined.pop(own + _OF_VALUES)
        assert isinstance(keys, StoredTensor), "of a file"
        assert isinstance(values, StoredTensor), "of a file"
        joined[own] = StoredWeight(
            shape=(shape.num_heads * (shape.plain_size + shape.value_size), shape.rank),
            stored_type=keys.stored_type,
            format=None,
            parts=(keys, values),
            load=_Join(shape, keys, values),
        )
    return joined


@dataclass(frozen=True, slots=True)
class _Join:
    shape: LatentShape
    keys: StoredTensor  # [Hq rank, plain]
    values: StoredTensor  # [Hq value, rank]

    def __call__(self) -> npt.NDArray[np.float32]:
        heads = self.shape.num_heads
        keys, values = (
            np.asarray(part.load()).astype(np.float32).reshape(heads, -1, part.shape[1])
            for part in (self.keys, self.values)
        )
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return both.reshape(-1, self.shape.rank)
