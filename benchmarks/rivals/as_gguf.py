"""Converts a random checkpoint of Llama's or Qwen3.5's shape to GGUF, to compare with llama.cpp.

    pip install gguf
    python benchmarks/rivals/as_gguf.py FOLDER OUT.gguf [BF16|Q8_0|Q4_0|Q4_1]

Create FOLDER with `cadenza bench make-checkpoint --shape smollm2-135m FOLDER`. Weights become
bfloat16 or the given type (in 4 bits the embedding is in Q8_0), norms float32, and rows of query
and key weights, or value heads of recurrent layers, have llama.cpp's order, so that Cadenza gives
the same tokens for both. Scaled rotary positions and MTP layers are not written.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cadenza.checkpoint.weights import open_weights

LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HYBRID_PARTS = LAYER_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
HYBRID_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
ARCHITECTURES = {"llama": "llama", "qwen3_5_text": "qwen35"}


def name_of(tensor: str, *, is_hybrid: bool) -> str:
    """The name of a tensor in llama.cpp."""
    if tensor == "model.embed_tokens.weight":
        return "token_embd.weight"
    if tensor == "model.norm.weight":
        return "output_norm.weight"
    layer, _, part = tensor.removeprefix("model.layers.").partition(".")
    if part in HYBRID_NAMES:
        return f"blk.{layer}.{HYBRID_NAMES[part]}"
    parts = HYBRID_PARTS if is_hybrid else LAYER_PARTS
    return f"blk.{layer}.{parts[part.removesuffix('.weight')]}.weight"


def in_pairs(array: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows of each head in the order 0, D / 2, 1, D / 2 + 1, …, for a rotation of neighbours."""
    halves = array.reshape(-1, 2, head_dim // 2, array.shape[1])  # [H, 2, D / 2, E]
    return halves.swapaxes(1, 2).reshape(array.shape)


def tiled(array: np.ndarray[Any, Any], config: dict[str, Any], axis: int = 0) -> Any:
    """Value heads in the order 0, G, 2 G, …, 1, G + 1, …, for groups of G that share a key head."""
    groups = config["linear_num_key_heads"]
    heads = config["linear_num_value_heads"]
    places = np.arange(array.shape[axis]).reshape(groups, heads // groups, -1)
    return np.take(array, places.swapaxes(0, 1).ravel(), axis)


def of_hybrid(name: str, array: np.ndarray[Any, Any], config: dict[str, Any]) -> Any:
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
    interval = config["layer_types"].index("full_attention") + 1
    writer.add_uint32("qwen35.full_attention_interval", interval)


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


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


def type_of(tensor: str, wanted: str) -> gguf.GGMLQuantizationType:
    if tensor.endswith(("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight")):
        return gguf.GGMLQuantizationType.F32
    is_embedding = tensor == "model.embed_tokens.weight"
    return gguf.GGMLQuantizationType["Q8_0" if is_embedding and wanted != "BF16" else wanted]


def main(folder: Path, out: Path, wanted: str = "BF16") -> None:
    config = json.loads((folder / "config.json").read_text())
    is_hybrid = config["model_type"] != "llama"
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]])
    add_shape(writer, config)
    if is_hybrid:
        add_states(writer, config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted}"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    add_tokenizer(writer, tokenizer, config["vocab_size"])
    weights = open_weights(folder)
    for name in sorted(each for each in weights if not each.startswith("mtp.")):
        array, own = np.asarray(weights[name], np.float32), name_of(name, is_hybrid=is_hybrid)
        if is_hybrid:
            array = of_hybrid(name, array, config)
        elif name.endswith((".q_proj.weight", ".k_proj.weight")):
            array = in_pairs(array, config["head_dim"])
        if array.ndim == 1:
            writer.add_tensor(own, array)
        else:
            kind = type_of(name, wanted)
            writer.add_tensor(own, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
