"""GGUF files of models in the Hugging Face layout, written through gguf-py.

Owns llama.cpp's side of the conversion: metadata as its converter writes them, tensor names from
gguf-py's own table, rows of queries and keys in pairs, stacked experts, norms of Gemma with their
one. Knows nothing of the reader under test.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.config_json import parse_model_config
from cadenza.models.layer_kind import ConvShape, DeltaShape, LayerKind, ScanShape
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeConfig,
    YarnRopeScaling,
    axes_of,
)
from tests.checkpoint.config_writer import format_model_config, write_random_checkpoint
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
GEMMAS_4 = dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-unified"), "gemma4")
SEEING = {"qwen2-vl": "qwen2vl", "qwen3-vl": "qwen3vl", "qwen3-moe-vl": "qwen3vlmoe"}
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
    if shape in SEEING:
        text = tiny_config(shape.removesuffix("-vl"))
        pairs = text.rope.rotary_dim // 2
        kind = "joined" if shape == "qwen2-vl" else "interleaved"
        sizes = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        return replace(text, rope=replace(text.rope, axes=axes_of(sizes, pairs, kind)))
    config = named_shape(f"tiny-{shape}")
    if shape in GEMMAS_4:
        return config
    values = format_model_config(config)
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
    architecture = (ARCHITECTURES | HYBRIDS | GEMMAS_4 | SEEING)[shape]
    return convert_config(architecture, tiny_config(shape), folder, dtype=dtype)


def convert_config(
    architecture: str, config: ModelConfig, folder: Path, *, dtype: Any = "float32"
) -> Conversion:
    write_random_checkpoint(config, folder, seed=5, dtype=dtype)
    weights = open_checkpoint(folder).weights
    arrays = {name: np.asarray(weights[name]).astype(np.float32) for name in weights}
    return Conversion(
        architecture=architecture,
        metadata=describe(architecture, config),
        tensors=rename(architecture, config, arrays) | factors(config),
        kind={"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype],
        original=folder,
    )


Describe = Mapping[str, Callable[[Any], Any]]
ALL: Describe = {
    "block_count": lambda c: c.num_layers + _num_stored_mtp_layers(c),
    "context_length": lambda c: c.max_position_embeddings,
    "embedding_length": lambda c: c.hidden_size,
    "feed_forward_length": lambda c: _one_or_each(
        [kind.intermediate_size or c.intermediate_size for kind in c.layer_kinds]
    ),
    "attention.head_count": lambda c: c.num_heads,
    "attention.head_count_kv": lambda c: _one_or_each(
        [0 if kind.recurrence else c.heads_of(kind).num_kv_heads for kind in c.layer_kinds]
        if not isinstance(c.recurrence, DeltaShape)
        else [c.num_kv_heads]
    ),
    "attention.key_length": lambda c: c.heads_of(c.layer_kinds[-1]).head_dim,
    "attention.value_length": lambda c: c.heads_of(c.layer_kinds[-1]).head_dim,
    "attention.layer_norm_rms_epsilon": lambda c: c.rms_norm_eps,
    "rope.freq_base": lambda c: c.rope.theta,
    "rope.dimension_count": lambda c: c.rope.rotary_dim,
    "vocab_size": lambda c: c.vocab_size,
    "attention.sliding_window": lambda c: max(map(_window_of, c.layer_kinds)) or None,
    "attn_logit_softcapping": lambda c: c.attention_soft_cap,
    "final_logit_softcapping": lambda c: c.logit_soft_cap,
    "rope.dimension_sections": lambda c: (
        c.rope.axes and [*(c.rope.axes.count(axis) for axis in range(3)), 0]
    ),
}
PATTERN: Describe = {
    "attention.sliding_window_pattern": lambda c: [bool(_window_of(k)) for k in c.layer_kinds],
}
MULTIPLIERS: Describe = {
    "attention.scale": lambda c: c.attention_scale,
    "embedding_scale": lambda c: c.embedding_scale,
    "residual_scale": lambda c: c.residual_scale,
    "logit_scale": lambda c: c.logit_divisor,
}
EXPERTS: Describe = {
    "expert_count": lambda c: c.experts.num_experts,
    "expert_used_count": lambda c: c.experts.num_chosen,
}
EXPERT_WIDTH: Describe = {"expert_feed_forward_length": lambda c: c.experts.intermediate_size}
SHARED: Describe = {
    "expert_shared_feed_forward_length": lambda c: c.experts.shared_size or None,
}
GEMMA4: Describe = {
    **PATTERN,
    "attention.key_length_swa": lambda c: c.head_dim,
    "attention.value_length_swa": lambda c: c.head_dim,
    "rope.dimension_count_swa": lambda c: c.head_dim,
    "attention.shared_kv_layers": lambda c: sum(k.kv_source is not None for k in c.layer_kinds),
    "embedding_length_per_layer_input": lambda c: c.layer_inputs.size if c.layer_inputs else 0,
    "rope.freq_base_swa": lambda c: c.window_rope.theta,
}
CONV: Describe = {"shortconv.l_cache": lambda c: c.recurrence.num_inputs}
CONV_EXPERTS: Describe = {
    "leading_dense_block_count": lambda c: sum(not k.has_experts for k in c.layer_kinds),
    "expert_gating_func": lambda c: 2,
}
MATRICES: Describe = {
    "ssm.conv_kernel": lambda c: c.recurrence.num_inputs,
    "ssm.state_size": lambda c: c.recurrence.key_size,
    "ssm.time_step_rank": lambda c: c.recurrence.matrices.num_heads,
    "ssm.inner_size": lambda c: c.recurrence.value_width,
}
DELTA: Describe = {
    **MATRICES,
    "ssm.group_count": lambda c: c.recurrence.num_key_heads,
    "nextn_predict_layers": lambda c: c.num_mtp_layers,
    "attention.recurrent_layers": lambda c: (
        [k.recurrence is not None for k in c.layer_kinds] + [False] * c.num_mtp_layers
    ),
}
SCAN: Describe = {
    **MATRICES,
    "ssm.group_count": lambda c: c.recurrence.num_groups,
    "rope.scaling.finetuned": lambda c: any(c.ropes),
}
LATENT: Describe = {  # as attention of one KV head, whose values are a part of its keys
    "attention.head_count_kv": lambda c: 1,
    "attention.kv_lora_rank": lambda c: c.latent.rank,
    "attention.q_lora_rank": lambda c: c.latent.query_rank,
    "attention.key_length": lambda c: c.latent.rank + c.latent.rotary_size,
    "attention.value_length": lambda c: c.latent.rank,
    "attention.key_length_mla": lambda c: c.latent.query_size,
    "attention.value_length_mla": lambda c: c.latent.value_size,
    **CONV_EXPERTS,
    "expert_shared_count": lambda c: c.experts.shared_size // c.experts.intermediate_size,
    "expert_weights_scale": lambda c: c.experts.weight_scale,
    "expert_weights_norm": lambda c: c.experts.over_chosen,
    "expert_group_count": lambda c: c.experts.sigmoid_choice.num_groups,
    "expert_group_used_count": lambda c: c.experts.sigmoid_choice.num_chosen_groups,
    "rope.scaling.yarn_log_multiplier": lambda c: 0.1 * c.rope.scaling.mscale_all_dim,
}
ORIGINAL: Describe = {
    "rope.scaling.original_context_length": lambda c: (
        c.rope.scaling.original_max_position_embeddings
    ),
}
LINEAR: Describe = {
    "rope.scaling.type": lambda c: "linear",
    "rope.scaling.factor": lambda c: c.rope.scaling.factor,
}
YARN: Describe = {
    **ORIGINAL,
    "rope.scaling.type": lambda c: "yarn",
    "rope.scaling.factor": lambda c: c.rope.scaling.factor,
    "rope.scaling.yarn_beta_fast": lambda c: c.rope.scaling.beta_fast,
    "rope.scaling.yarn_beta_slow": lambda c: c.rope.scaling.beta_slow,
}
QUERY_BETA: Describe = {
    "attention.temperature_scale": lambda c: c.rope.scaling.query_beta,
    "rope.scaling.yarn_log_multiplier": lambda c: 1.0,
}
LONG: Describe = {
    **ORIGINAL,
    "rope.scaling.attn_factor": lambda c: c.rope.scaling.attention_factor,
}


def describe(architecture: str, config: ModelConfig) -> dict[str, Any]:
    scaling, shape, experts = config.rope.scaling, config.recurrence, config.experts
    wide = ("qwen3moe", "qwen3vlmoe", "qwen35moe", "lfm2moe", "gpt-oss", "deepseek2", "gemma4")
    groups: list[tuple[Describe, bool]] = [
        (ALL, True),
        (PATTERN, architecture == "gemma3"),
        (MULTIPLIERS, architecture.startswith("granite")),
        (EXPERTS, experts is not None),
        (EXPERT_WIDTH, experts is not None and architecture in wide),
        (SHARED, experts is not None and config.latent is None),
        (GEMMA4, architecture == "gemma4"),
        (CONV, isinstance(shape, ConvShape)),
        (CONV_EXPERTS, isinstance(shape, ConvShape) and experts is not None),
        (DELTA, isinstance(shape, DeltaShape)),
        (SCAN, isinstance(shape, ScanShape)),
        (LINEAR, isinstance(scaling, LinearRopeScaling)),
        (YARN, isinstance(scaling, YarnRopeScaling)),
        (QUERY_BETA, isinstance(scaling, YarnRopeScaling) and scaling.query_beta > 0),
        (LONG, isinstance(scaling, LongRopeScaling)),
        (LATENT, config.latent is not None),
    ]
    rows = {key: read for group, applies in groups for key, read in group.items() if applies}
    values = {key: read(config) for key, read in rows.items()}
    return {key: value for key, value in values.items() if value not in (None, ())}


def _num_stored_mtp_layers(config: ModelConfig) -> int:
    return config.num_mtp_layers if isinstance(config.recurrence, DeltaShape) else 0


def _window_of(kind: LayerKind) -> int:
    return kind.window or 0


def _one_or_each(values: list[int]) -> int | list[int]:
    return values if len(set(values)) > 1 else values[0]


def factors(config: ModelConfig) -> Arrays:
    match config.rope.scaling:
        case Llama3RopeScaling() as scaling:
            return {"rope_freqs.weight": llama3_factors(config.rope, scaling)}
        case ProportionalRopeScaling(num_pairs=num_pairs):
            standing = config.rope.rotary_dim // 2 - num_pairs
            values = [1.0] * num_pairs + [1e30] * standing
            return {"rope_freqs.weight": np.array(values, np.float32)}
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
    if architecture == "gemma4":
        stacked = fuse_experts(stacked)
    for stored, array in split_pairs(config, stacked).items():
        name = stored.replace("mtp.layers.0.", f"model.layers.{config.num_layers}.")
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("_correction_b", "_correction.b")
        name = f"{name}.weight" if name.endswith(".sinks") else name
        name = f"{name}.bias" if name.endswith(".expert_bias") else name
        other = OF_GEMMA4.get(name.split(".", 3)[-1])
        if other is not None:
            found = f"blk.{name.split('.')[2]}.{other}"
        elif name in AROUND_MTP:
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


def fuse_experts(arrays: Arrays) -> Arrays:
    """Gates and ups of experts as the folders of Gemma 4 have them: as one."""
    found = dict(arrays)
    for name in [name for name in arrays if name.endswith("experts.gate_proj.weight")]:
        before = name.removesuffix("gate_proj.weight")
        both = [found.pop(f"{before}{part}_proj.weight") for part in ("gate", "up")]
        found[f"{before}gate_up_proj.weight"] = np.concatenate(both, axis=1)
    return found


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


OF_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
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
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
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
