"""Writes a GGUF file to compare with llama.cpp: a random checkpoint, or random codes of a shape.

    pip install gguf
    python benchmarks/rivals/as_gguf.py FOLDER OUT.gguf [BF16|Q8_0|Q4_0|Q4_1]
    python benchmarks/rivals/as_gguf.py SHAPE OUT.gguf [BF16|Q8_0|Q4_0|Q4_1|Q4_K_M] [--layers N]

Create FOLDER with `cadenza bench make-checkpoint --shape smollm2-135m FOLDER`. Weights become
bfloat16 or the given type (in 4 bits the embedding is in Q8_0), norms float32, and rows of query
and key weights, or value heads of recurrent layers, have llama.cpp's order, so that Cadenza gives
the same tokens for both. Shapes of Llama, Qwen3, Qwen3-MoE and Qwen3.5 can be written. Scaled
rotary positions and MTP layers are not.

With a shape's name (or its config.json) in place of the folder, quantised weights are drawn as
codes and scales, which takes seconds a gigabyte and no more memory than one tensor; the spread of
their values is that of the random checkpoint. Q4_K_M gives each tensor the type that llama-quantize
gives it. --layers leaves out the layers behind the first N.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from cadenza.bench.checkpoints import write_random_tokenizer
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import distribution_of, named_shape
from cadenza.checkpoint.tokenizer_files import TOKENIZER_FILE
from cadenza.models.declaration import declare
from cadenza.models.layer_kind import DeltaShape
from cadenza.models.model_config import ModelConfig
from cadenza.weights.tensor_spec import TensorSpec

Array = np.ndarray[Any, Any]

LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
HYBRID_PARTS = LAYER_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
HYBRID_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
EXPERTS = re.compile(r"\.experts\.\d+\.")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
PAIRED = (".q_proj.weight", ".k_proj.weight")
TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
FALLBACKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""For rows that are no multiple of 256 elements."""


def name_of(tensor: str, *, is_hybrid: bool) -> str:
    """The name of a tensor in llama.cpp; all experts of a layer have one."""
    if tensor == "model.embed_tokens.weight":
        return "token_embd.weight"
    if tensor == "model.norm.weight":
        return "output_norm.weight"
    if tensor == "lm_head.weight":
        return "output.weight"
    layer, _, part = tensor.removeprefix("model.layers.").partition(".")
    part = EXPERTS.sub(".experts.", part)
    if part in HYBRID_NAMES:
        return f"blk.{layer}.{HYBRID_NAMES[part]}"
    parts = HYBRID_PARTS if is_hybrid else LAYER_PARTS
    return f"blk.{layer}.{parts[part.removesuffix('.weight')]}.weight"


def in_pairs(array: Array, head_dim: int) -> Array:
    """Rows of each head in the order 0, D / 2, 1, D / 2 + 1, …, for a rotation of neighbours."""
    halves = array.reshape(-1, 2, head_dim // 2, array.shape[1])  # [H, 2, D / 2, E]
    return halves.swapaxes(1, 2).reshape(array.shape)


def tiled(array: Array, config: dict[str, Any], axis: int = 0) -> Any:
    """Value heads in the order 0, G, 2 G, …, 1, G + 1, …, for groups of G that share a key head."""
    groups = config["linear_num_key_heads"]
    heads = config["linear_num_value_heads"]
    places = np.arange(array.shape[axis]).reshape(groups, heads // groups, -1)
    return np.take(array, places.swapaxes(0, 1).ravel(), axis)


def of_hybrid(name: str, array: Array, config: dict[str, Any]) -> Any:
    """A tensor of Qwen3.5 as llama.cpp stores it."""
    part = name.rsplit("linear_attn.", maxsplit=1)[-1]
    if part == name:
        return array + np.float32(1.0) if name.endswith("norm.weight") else array
    if part == "norm.weight":
        return array
    if part == "out_proj.weight":
        return tiled(array, config, axis=1)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        fixed, values = np.split(array, [2 * width])
        return np.concatenate([fixed, tiled(values, config)]).reshape(len(array), -1)
    heads = tiled(array, config)
    return -np.exp(heads) if part == "A_log" else heads


def add_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    interval = config["full_attention_interval"]
    writer.add_uint32(f"{writer.arch}.full_attention_interval", interval)


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 0)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["rotary_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def unreachable_merge(tokens: set[str]) -> list[str]:
    """For a vocabulary without merges, which llama.cpp refuses: one whose parts need merges."""
    return next(
        [token[:cut], token[cut:]]
        for token in sorted(tokens)
        for cut in range(2, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    )


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocab_size: int) -> None:
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    controls = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [controls.get(i) or texts.get(i, f"<unused{i}>") for i in range(vocab_size)]
    )
    writer.add_token_types([kinds[i in controls] for i in range(vocab_size)])
    merges = tokenizer["model"].get("merges") or [unreachable_merge(set(texts.values()))]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the file: one of the model's, or those of all experts of a layer."""

    name: str
    kind: Kind
    parts: tuple[TensorSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.parts[0].shape
        if self.name.endswith("_shexp.weight") and own[0] == 1:
            return own[1:]
        own = (own[0], prod(own[1:])) if len(own) == 3 else own
        return (len(self.parts), *own) if EXPERTS.search(self.parts[0].name) else own

    @property
    def num_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // block * block_bytes


def stored_tensors(config: ModelConfig, wanted: str) -> list[Stored]:
    """The tensors of the file in their order."""
    is_hybrid = any(kind.recurrence is not None for kind in config.layer_kinds)
    groups: dict[str, list[TensorSpec]] = {}
    for spec in declare(config):
        groups.setdefault(name_of(spec.name, is_hybrid=is_hybrid), []).append(spec)
    return [
        Stored(name=name, kind=type_of(name, parts[0], config, wanted), parts=tuple(parts))
        for name, parts in groups.items()
    ]


def type_of(name: str, spec: TensorSpec, config: ModelConfig, wanted: str) -> Kind:
    is_plain = len(spec.shape) == 1 or spec.shape[0] == 1 or spec.kind in ("router", "filter")
    if is_plain or "ssm_alpha" in name or "ssm_beta" in name:
        return Kind.F32
    if wanted == "Q4_K_M":
        kind = mixed_type(name, config)
        return kind if spec.shape[-1] % 256 == 0 else FALLBACKS[kind]
    is_embedding = name == "token_embd.weight"
    return Kind["Q8_0" if is_embedding and wanted != "BF16" else wanted]


def mixed_type(name: str, config: ModelConfig) -> Kind:
    """As llama.cpp's `llama_tensor_get_type` for Q4_K_M, with other than eight experts."""
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return Kind.Q6_K
    if ".attn_qkv." in name:
        return Kind.Q5_K
    if ".attn_v." not in name and ".ffn_down" not in name:
        return Kind.Q4_K
    layers = list(range(config.num_layers))
    if ".attn_v." in name:
        layers = [at for at in layers if config.layer_kinds[at].recurrence is None]
    at, eighth = layers.index(int(name.split(".")[1])), len(layers) // 8
    has_more = at < eighth or at >= 7 * len(layers) // 8 or (at - eighth) % 3 == 2
    return Kind.Q6_K if has_more else Kind.Q4_K


def random_bytes(generator: np.random.Generator, count: int, kind: Kind) -> Array:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    found = generator.integers(0, 1 << 64, -(-count * size // 8), np.uint64)
    return found.view(np.uint8)[: count * size].reshape(count, size)


def put_half(blocks: Array, at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def deviation(num_codes: int) -> float:
    """Of codes that are drawn evenly."""
    return float(np.sqrt((num_codes**2 - 1) / 12))


def random_k(generator: np.random.Generator, count: int, kind: Kind, sigma: float) -> Array:
    """Q4_K and Q5_K with scales from 32 to 63, and minimums that make the mean 0."""
    blocks, num_codes = random_bytes(generator, count, kind), 16 if kind == Kind.Q4_K else 32
    scales = blocks[:, 4:12] & 31 | 32
    low, high = scales[:, :4], scales[:, 4:]
    first, last = low | high >> 4 << 6, (high & 15) | (high & 15) << 4
    blocks[:, 4:16] = np.concatenate([first, first, last], axis=1)
    scale = sigma / (48.4 * deviation(num_codes))
    put_half(blocks, 0, scale)
    put_half(blocks, 2, scale * (num_codes - 1) / 2)
    return blocks


def random_q6_k(generator: np.random.Generator, count: int, kind: Kind, sigma: float) -> Array:
    """Scales of either sign, whose magnitudes are from 64 to 127."""
    blocks = random_bytes(generator, count, kind)
    drawn = blocks[:, 192:208]
    scales = ((drawn & 63) + 64).view(np.int8)
    blocks[:, 192:208] = np.where(drawn & 64, scales, -scales).view(np.uint8)
    put_half(blocks, 208, sigma / (97.2 * deviation(64)))
    return blocks


def random_q8_0(generator: np.random.Generator, count: int, kind: Kind, sigma: float) -> Array:
    blocks = random_bytes(generator, count, kind)
    put_half(blocks, 0, sigma / deviation(256))
    return blocks


RANDOM_BLOCKS: dict[Kind, Callable[[np.random.Generator, int, Kind, float], Array]] = {
    Kind.Q4_K: random_k,
    Kind.Q5_K: random_k,
    Kind.Q6_K: random_q6_k,
    Kind.Q8_0: random_q8_0,
}
"""Of a number of blocks [B, bytes of one]."""


Draw = Callable[[TensorSpec], Array]


def of_folder(folder: Path) -> tuple[ModelConfig, Draw]:
    """A checkpoint's config, and its tensors in float32."""
    checkpoint = open_checkpoint(folder)
    return checkpoint.config, lambda spec: checkpoint.weights.array(spec.name).astype(np.float32)


def of_shape(config: ModelConfig, generator: np.random.Generator) -> Draw:
    def draw(spec: TensorSpec) -> Array:
        normal = distribution_of(spec, config)
        values = generator.standard_normal(spec.shape, np.float32)
        return values * np.float32(normal.sigma) + np.float32(normal.mean)

    return draw


def as_stored(array: Array, spec: TensorSpec, settings: dict[str, Any]) -> Array:
    """A tensor of the model as llama.cpp orders it."""
    if settings["model_type"] in HYBRIDS:
        return of_hybrid(spec.name, array, settings)
    is_paired = settings["model_type"] == "llama" and spec.name.endswith(PAIRED)
    return in_pairs(array, settings["head_dim"]) if is_paired else array


def converted(stored: Stored, draw: Draw, settings: dict[str, Any]) -> Iterator[Array]:
    """The bytes of each part."""
    for spec in stored.parts:
        array = np.ascontiguousarray(as_stored(draw(spec), spec, settings), np.float32)
        yield gguf.quantize(array.reshape(len(array), -1), stored.kind).view(np.uint8).ravel()


def drawn_codes(
    stored: Stored, config: ModelConfig, generator: np.random.Generator
) -> Iterator[Array]:
    block = gguf.GGML_QUANT_SIZES[stored.kind][0]
    for spec in stored.parts:
        sigma, count = distribution_of(spec, config).sigma, spec.num_elements // block
        yield RANDOM_BLOCKS[stored.kind](generator, count, stored.kind, sigma).ravel()


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """By the names of config.json."""
    found: dict[str, Any] = {
        "model_type": config.family,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rotary_dim": config.rope.rotary_dim,
        "rope_theta": config.rope.theta,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    if (experts := config.experts) is not None:
        found["num_experts"] = experts.num_experts
        found["num_experts_per_tok"] = experts.num_chosen
        found["moe_intermediate_size"] = experts.intermediate_size
        if experts.shared_size:
            found["shared_expert_intermediate_size"] = experts.shared_size
    if isinstance(shape := config.recurrence, DeltaShape):
        found["linear_num_key_heads"] = shape.num_key_heads
        found["linear_num_value_heads"] = shape.num_value_heads
        found["linear_key_head_dim"] = shape.key_size
        found["linear_value_head_dim"] = shape.value_size
        found["linear_conv_kernel_dim"] = shape.num_inputs
        full = next(n for n, kind in enumerate(config.layer_kinds, 1) if kind.recurrence is None)
        found["full_attention_interval"] = full
    return found


def shortened(config: ModelConfig, num_layers: int | None) -> ModelConfig:
    kinds = config.layer_kinds[:num_layers]
    return replace(config, num_layers=len(kinds), layer_pattern=kinds)


def tokenizer_of(folder: Path, vocab_size: int) -> dict[str, Any]:
    if (folder / TOKENIZER_FILE).is_file():
        return json.loads((folder / TOKENIZER_FILE).read_text())
    with tempfile.TemporaryDirectory() as made:
        write_random_tokenizer(Path(made, TOKENIZER_FILE), vocab_size)
        return tokenizer_of(Path(made), vocab_size)


def add_metadata(writer: gguf.GGUFWriter, settings: dict[str, Any], wanted: str) -> None:
    add_shape(writer, settings)
    if settings["model_type"] in HYBRIDS:
        add_states(writer, settings)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted}"])


def convert(source: str, out: Path, wanted: str, num_layers: int | None) -> None:
    """Writes the file; `source` is a folder with weights, a shape's name or its config.json."""
    generator = np.random.Generator(np.random.SFC64(0))
    if has_weights := any(Path(source).glob("*.safetensors")):
        config, draw = of_folder(Path(source))
        config = shortened(config, num_layers)
    else:
        config = shortened(named_shape(source), num_layers)
        draw = of_shape(config, generator)
    settings, tensors = settings_of(config), stored_tensors(config, wanted)
    writer = gguf.GGUFWriter(out, ARCHITECTURES[settings["model_type"]])
    add_metadata(writer, settings, wanted)
    add_tokenizer(writer, tokenizer_of(Path(source), config.vocab_size), config.vocab_size)
    for each in tensors:
        writer.add_tensor_info(
            each.name, each.shape, np.dtype(np.float32), each.num_bytes, each.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in tensors:
        has_drawn = not has_weights and each.kind in RANDOM_BLOCKS
        parts = (
            drawn_codes(each, config, generator) if has_drawn else converted(each, draw, settings)
        )
        writer.write_tensor_data(np.concatenate(list(parts)))
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="a folder with a checkpoint, or a shape")
    parser.add_argument("out", type=Path)
    parser.add_argument("type", nargs="?", default="BF16", choices=TYPES)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args(arguments)
    if given.type == "Q4_K_M" and any(Path(given.source).glob("*.safetensors")):
        parser.error("Q4_K_M is written for a shape only; a folder's weights: llama-quantize")
    convert(given.source, given.out, given.type, given.layers)


if __name__ == "__main__":
    main()
