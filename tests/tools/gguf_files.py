"""Small GGUF files, written as llama.cpp's converter writes a model in the Hugging Face layout.

Owns llama.cpp's side of the conversion: its names, the rows of queries and keys in pairs, the norms
of Gemma with their one. Knows nothing of the tool under test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.config_json import parse_model_config
from tests.checkpoint.config_writer import write_random_checkpoint

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}

CONTROL, USER_DEFINED, NORMAL, BYTE = 3, 4, 1, 6

BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = [*"▁abc<>", "bc", "ab", "▁a", "bca", "▁ab", "<a"]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "pre": "default",
    "tokens": ["<pad>", "<end>", "<start>", "<unk>", "  ", "<a>", *BYTES, *PIECES],
    "scores": [-1000.0] * 6 + [0.0] * 256 + [-9.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "token_type": [CONTROL] * 4 + [USER_DEFINED] * 2 + [BYTE] * 256 + [NORMAL] * len(PIECES),
    "bos_token_id": 2,
    "eos_token_id": 1,
    "unknown_token_id": 3,
    "padding_token_id": 0,
    "add_bos_token": True,
    "add_eos_token": False,
    "add_space_prefix": False,
}
BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": ["<start>", "<end>", *"abc123'", "Ġ", "ab", "Ġab", "12", "Ã", "©"],
    "token_type": [CONTROL] * 2 + [NORMAL] * 13,
    "merges": ["a b", "Ġ ab", "1 2"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "add_bos_token": False,
    "add_space_prefix": False,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": len(BYTE_LEVEL["tokens"]),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": ROPE,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": len(SENTENCEPIECE["tokens"]),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) + ["sliding_attention"],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": LOCAL_ROPE},
        "dtype": "float32",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}


@dataclass(slots=True, kw_only=True)
class SmallModel:
    """What is to be written; a test changes a part of it.

    `tensors`: float arrays by GGUF's names. `types`: those that are not stored as F32.
    """

    architecture: str
    metadata: dict[str, Any]
    tokenizer: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    original: Path


def small_model(architecture: str, folder: Path) -> SmallModel:
    """A random model of the architecture; its Hugging Face form is written into `folder`."""
    config = parse_model_config(CONFIGS[architecture])
    write_random_checkpoint(config, folder, seed=3, dtype="float32")
    weights = open_checkpoint(folder).weights
    metadata = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 5000.0,
    }
    if architecture == "gemma3":
        metadata |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.sliding_window": 16,
        }
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return SmallModel(
        architecture=architecture,
        metadata=metadata,
        tokenizer=dict(BYTE_LEVEL if architecture == "llama" else SENTENCEPIECE),
        tensors={
            gguf_name(name, architecture): as_llama_cpp_stores(
                np.asarray(weights[name]), name, architecture, heads
            )
            for name in weights
        },
        original=folder,
    )


def gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{(LINEARS | NORMS[architecture])[place]}.{kind}"


def as_llama_cpp_stores(
    array: np.ndarray, name: str, architecture: str, heads: Mapping[str, int]
) -> np.ndarray:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return array + np.float32(1.0)
    projection = name.split(".")[-2]
    if architecture != "llama" or projection not in heads:
        return array
    head_dim = len(array) // heads[projection]
    paired = [
        head * head_dim + half * head_dim // 2 + index
        for head in range(heads[projection])
        for index in range(head_dim // 2)
        for half in range(2)
    ]
    return array[paired]


def write_gguf(model: SmallModel, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in model.metadata.items():
        add_value(writer, f"{model.architecture}.{key}", value)
    for key, value in model.tokenizer.items():
        add_value(writer, f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(TEMPLATE)
    for name, array in model.tensors.items():
        kind = model.types.get(name)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
