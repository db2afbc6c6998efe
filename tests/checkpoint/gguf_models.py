"""GGUF files of models in the Hugging Face layout, written through gguf-py.

Owns llama.cpp's side of the conversion: metadata as its converter writes them, tensor names from
gguf-py's own table, rows of queries and keys in pairs, stacked experts, norms of Gemma with their
one. Knows nothing of the reader under test.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cadenza.checkpoint import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelConfig,
    RopeConfig,
    YarnRopeScaling,
    named_shape,
    open_checkpoint,
    write_random_checkpoint,
)
from cadenza.checkpoint.config_json import parse_model_config
from cadenza.checkpoint.config_writer import format_model_config
from cadenza.checkpoint.layer_kind import ConvShape, DeltaShape, ScanShape
from cadenza.checkpoint.weights import Weights
from tests.checkpoint.gguf_random import FACTORS, random_tensor

Arrays = dict[str, np.ndarray]

LIKE_LLAMA = ("llama", "mistral3", "granite", "granitehybrid", "smollm3")
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "granite": "granite",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "lfm2": "lfm2",
    "gpt-oss": "gpt-oss",
    "deepseek-v3": "deepseek2",
}
HYBRIDS = {
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2moe",
    "granite4": "granitehybrid",
    "granite4-moe": "granitehybrid",
}
"""GGUF's architecture for each tiny shape."""

CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "deepseek-v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.8,
            "mscale_all_dim": 0.8,
        }
    },
}
"""What of a tiny shape GGUF cannot express: it has no key for it, and llama.cpp a fixed value."""


def tiny_config(shape: str) -> ModelConfig:
    values = format_model_config(named_shape(f"tiny-{shape}"))
    return parse_model_config({**values, **CHANGES.get(shape, {})})


@dataclass(slots=True, kw_only=True)
class Conversion:
    """What is to be written; a test changes a part of it.

    `metadata`: beyond the architecture's prefix. `others`: complete keys. `tensors`: by GGUF's
    names. `kind`: type of the tensors with two axes or more, `kinds` of those that differ; those in
    a K-quant are random.
    """

    architecture: str
    metadata: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    tensors: Arrays
    kind: str = "F32"
    kinds: dict[str, str] = field(default_factory=dict)
    original: Path

    def write(self, path: Path, *, num_per_file: int = 0) -> Path:
        """Writes `path`, or several files named after it with so many tensors each."""
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=num_per_file)
        for key, value in self.metadata.items():
            add_value(writer, f"{self.architecture}.{key}", value)
        for key, value in self.others.items():
            add_value(writer, key, value)
        for name, array in self.tensors.items():
            is_vector = array.ndim == 1 or name.endswith(".bias")
            kind = self.kinds.get(name, "F32" if is_vector else self.kind)
            code = gguf.GGMLQuantizationType[kind]
            if kind in FACTORS:
                stored = random_tensor(kind, array.shape, seed=len(name))
            else:
                stored = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), code)
            writer.add_tensor(name, stored, raw_dtype=code)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def convert(shape: str, folder: Path, *, dtype: Any = "float32") -> Conversion:
    """A random model of a tiny shape in `folder`, and what a GGUF file of it holds."""
    architecture = (ARCHITECTURES | HYBRIDS)[shape]
    return convert_config(architecture, tiny_config(shape), folder, dtype=dtype)


def convert_config(
    architecture: str, config: ModelConfig, folder: Path, *, dtype: Any = "float32"
) -> Conversion:
    write_random_checkpoint(config, folder, seed=5, dtype=dtype)
    weights = open_checkpoint(folder).weights
    arrays = {name: np.asarray(weights[name]).astype(np.float32) for name in weights}
    return Conversion(
        architecture=architecture,
        metadata=describe(architecture, config, weights),
        tensors=rename(architecture, config, arrays) | factors(config),
        kind={"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype],
        original=folder,
    )


def describe(architecture: str, config: ModelConfig, weights: Weights) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.rotary_dim,
        "vocab_size": config.vocab_size,
    }
    windows = [kind.window for kind in config.layer_kinds]
    if any(windows):
        values["attention.sliding_window"] = max(window or 0 for window in windows)
    if architecture == "gemma3":
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    if config.attention_soft_cap is not None:
        values["attn_logit_softcapping"] = config.attention_soft_cap
    if config.logit_soft_cap is not None:
        values["final_logit_softcapping"] = config.logit_soft_cap
    if architecture in ("granite", "granitehybrid"):
        values["attention.scale"] = config.attention_scale
        values["embedding_scale"] = config.embedding_scale
        values["residual_scale"] = config.residual_scale
        values["logit_scale"] = config.logit_divisor
    if config.experts is not None:
        values["expert_count"] = config.experts.num_experts
        values["expert_used_count"] = config.experts.num_chosen
        if config.experts.shared_size and config.latent is None:
            values["expert_shared_feed_forward_length"] = config.experts.shared_size
        if architecture in ("qwen3moe", "qwen35moe", "lfm2moe", "gpt-oss"):
            values["expert_feed_forward_length"] = config.experts.intermediate_size
    if axes := config.rope.axes:
        values["rope.dimension_sections"] = [*(axes.count(axis) for axis in range(3)), 0]
    values |= describe_recurrence(config) | describe_scaling(config)
    return values | describe_latents(config)


def describe_recurrence(config: ModelConfig) -> dict[str, Any]:
    shape, kinds = config.recurrence, config.layer_kinds
    kv_heads = [0 if kind.recurrence else config.num_kv_heads for kind in kinds]
    match shape:
        case None:
            return {}
        case ConvShape():
            own = {"attention.head_count_kv": kv_heads, "shortconv.l_cache": shape.num_inputs}
            if config.experts is not None:
                num_dense = sum(not kind.has_experts for kind in kinds)
                own |= {"leading_dense_block_count": num_dense, "expert_gating_func": 2}
            return own
        case ScanShape():
            own = {
                "attention.head_count_kv": kv_heads,
                "rope.scaling.finetuned": any(config.ropes),
            }
        case DeltaShape():
            are_recurrent = [kind.recurrence is not None for kind in kinds]
            own = {
                "block_count": config.num_layers + config.num_mtp_layers,
                "nextn_predict_layers": config.num_mtp_layers,
                "attention.recurrent_layers": are_recurrent + [False] * config.num_mtp_layers,
            }
    matrices = shape.matrices
    assert matrices is not None
    is_scan = isinstance(shape, ScanShape)
    return own | {
        "ssm.conv_kernel": shape.num_inputs,
        "ssm.state_size": shape.key_size,
        "ssm.group_count": shape.num_groups if is_scan else shape.num_key_heads,
        "ssm.time_step_rank": matrices.num_heads,
        "ssm.inner_size": shape.value_width,
    }


def describe_latents(config: ModelConfig) -> dict[str, Any]:
    """As attention of one KV head, whose values are a part of its keys."""
    shape, experts = config.latent, config.experts
    if shape is None:
        return {}
    assert experts is not None
    assert experts.sigmoid_choice is not None
    values: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": shape.rank,
        "attention.key_length": shape.rank + shape.rotary_size,
        "attention.value_length": shape.rank,
        "attention.key_length_mla": shape.query_size,
        "attention.value_length_mla": shape.value_size,
        "leading_dense_block_count": sum(not kind.has_experts for kind in config.layer_kinds),
        "expert_feed_forward_length": experts.intermediate_size,
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        "expert_weights_scale": experts.weight_scale,
        "expert_weights_norm": experts.over_chosen,
        "expert_gating_func": 2,
        "expert_group_count": experts.sigmoid_choice.num_groups,
        "expert_group_used_count": experts.sigmoid_choice.num_chosen_groups,
    }
    if shape.query_rank is not None:
        values["attention.q_lora_rank"] = shape.query_rank
    if isinstance(config.rope.scaling, YarnRopeScaling):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope.scaling.mscale_all_dim
    return values


def describe_scaling(config: ModelConfig) -> dict[str, Any]:
    original = "rope.scaling.original_context_length"
    match config.rope.scaling:
        case LinearRopeScaling(factor=factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnRopeScaling(factor=factor, original_max_position_embeddings=length):
            scaling = config.rope.scaling
            values = {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": factor,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
            if scaling.query_beta:
                values["attention.temperature_scale"] = scaling.query_beta
                values["rope.scaling.yarn_log_multiplier"] = 1.0
            return {**values, original: length}
        case LongRopeScaling(original_max_position_embeddings=length, attention_factor=factor):
            return {original: length, "rope.scaling.attn_factor": factor}
    return {}


def factors(config: ModelConfig) -> Arrays:
    match config.rope.scaling:
        case Llama3RopeScaling() as scaling:
            return {"rope_freqs.weight": llama3_factors(config.rope, scaling)}
        case LongRopeScaling(long_factor=long, short_factor=short):
            return {
                "rope_factors_long.weight": np.array(long, np.float32),
                "rope_factors_short.weight": np.array(short, np.float32),
            }
    return {}


def llama3_factors(rope: RopeConfig, scaling: Llama3RopeScaling) -> np.ndarray:
    """What each frequency is divided by, by the wavelength in tokens."""
    found: list[float] = []
    for pair in range(rope.rotary_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * pair / rope.rotary_dim)
        turns = scaling.original_max_position_embeddings / wavelength
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - kept) / scaling.factor + kept))
    return np.array(found, np.float32)


def rename(architecture: str, config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> Arrays:
    num_layers = config.num_layers + config.num_mtp_layers
    table = gguf.get_tensor_name_map(arch_code(architecture), num_layers)
    renamed: Arrays = {}
    stacked = stack_experts(split_latents(config, arrays))
    for stored, array in split_pairs(config, stacked).items():
        name = stored.replace("mtp.layers.0.", f"model.layers.{config.num_layers}.")
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("_correction_b", "_correction.b")
        name = f"{name}.weight" if name.endswith(".sinks") else name
        name = f"{name}.bias" if name.endswith(".expert_bias") else name
        if name in AROUND_MTP:
            found = f"blk.{config.num_layers}.nextn.{AROUND_MTP[name]}.weight"
        else:
            found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        renamed[found] = as_stored(architecture, config, stored, array)
    return renamed


def arch_code(architecture: str) -> gguf.MODEL_ARCH:
    return next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def split_latents(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The linears of keys and values apart, the keys' transposed."""
    shape, parts = config.latent, dict(arrays)
    for name in [name for name in arrays if shape is not None and ".kv_b_proj." in name]:
        assert shape is not None
        both = parts.pop(name).reshape(shape.num_heads, -1, shape.rank)
        keys, values = np.split(both, [shape.plain_size], axis=1)
        parts[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
        parts[name.replace("kv_b_proj", "v_b_proj")] = values
    return parts


def stack_experts(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The names that llama.cpp's converter gives merged experts before it looks them up."""
    stacked: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        before, _, after = name.partition(".experts.")
        if not after:
            stacked[name] = [array]
            continue
        merged = f"{before}.experts.{after.split('.', 1)[1]}"
        if "gate_proj" in after or "up_proj" in after or "down_proj" in after:
            merged = merged.replace(".block_sparse_moe.", ".mlp.")
        elif before.endswith("feed_forward"):
            merged = merged.removeprefix("model.")
        elif "block_sparse_moe" in before:
            layer = before.removeprefix("model.").removesuffix(".block_sparse_moe")
            merged = f"{layer}.feed_forward.experts.{after.split('.', 1)[1]}"
        stacked.setdefault(merged, []).append(array)
    return {
        name: np.stack(each) if ".experts." in name else each[0] for name, each in stacked.items()
    }


def split_pairs(config: ModelConfig, arrays: Arrays) -> Arrays:
    """Granite's MLP for all tokens as the converter stores it: gates and ups apart, and as the MLP
    of a dense model if there are no experts beside it."""
    split: Arrays = {}
    for name, array in arrays.items():
        layer, is_shared, linear = name.partition("shared_mlp.")
        block = f"{layer}mlp." + ("shared_expert." if config.experts else "")
        if not is_shared:
            split[name] = array
        elif linear == "input_linear.weight":
            split[f"{block}gate_proj.weight"], split[f"{block}up_proj.weight"] = np.split(array, 2)
        else:
            split[f"{block}down_proj.weight"] = array
    return split


AROUND_MTP = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
"""GGUF's names of what is around the block of an MTP layer, behind `blk.N.nextn.`."""


def of_hybrid(config: ModelConfig, name: str, array: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter makes of a tensor of Qwen3.5."""
    shape = config.recurrence
    assert isinstance(shape, DeltaShape)

    def tile(part: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
        places = np.arange(part.shape[axis]).reshape(shape.num_key_heads, -1, size)
        return np.take(part, places.transpose(1, 0, 2).reshape(-1), axis)

    if name.endswith("norm.weight") and "linear_attn" not in name:
        return array + np.float32(1.0)
    if "linear_attn" not in name or name.endswith("norm.weight"):
        return array[0] if name.endswith("shared_expert_gate.weight") else array
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        fixed, values = np.split(array, [2 * shape.key_width])
        both = np.concatenate([fixed, tile(values, shape.value_size)])
        return both[:, 0] if both.ndim == 3 else both
    if name.endswith("in_proj_z.weight"):
        return tile(array, shape.value_size)
    if name.endswith("out_proj.weight"):
        return tile(array, shape.value_size, axis=1)
    heads = tile(array, 1)
    return -np.exp(heads) if name.endswith("A_log") else heads


def as_stored(architecture: str, config: ModelConfig, name: str, array: np.ndarray) -> np.ndarray:
    if isinstance(config.recurrence, DeltaShape):
        return of_hybrid(config, name, array)
    if name.endswith((".conv.weight", "conv1d.weight")):
        return array[:, 0]
    if name.endswith((".A_log", ".D")):
        return -np.exp(array[:, None]) if name.endswith(".A_log") else array[:, None]
    if name.endswith("mamba.norm.weight"):
        assert isinstance(config.recurrence, ScanShape)
        return array.reshape(config.recurrence.num_groups, -1)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return array + np.float32(1.0)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if architecture not in LIKE_LLAMA or heads is None:
        return array
    half = config.head_dim // 2
    order = [
        head * config.head_dim + part * half + index
        for head in range(heads)
        for index in range(half)
        for part in range(2)
    ]
    return array[order]


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
