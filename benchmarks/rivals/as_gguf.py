"""Converts a random Llama-shaped checkpoint to GGUF, for comparison with llama.cpp.

    pip install gguf
    python benchmarks/rivals/as_gguf.py FOLDER OUT.gguf [BF16|Q8_0|Q4_0|Q4_1]

Create FOLDER with `cadenza bench make-checkpoint --shape smollm2-135m FOLDER`. Weights become
bfloat16 or the given type (in 4 bits the embedding is in Q8_0), norms float32, and rows of query
and key weights have llama.cpp's order, so that Cadenza gives the same tokens for both. Scaled
rotary positions are not written.
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


def name_of(tensor: str) -> str:
    """The name of a tensor in llama.cpp."""
    if tensor == "model.embed_tokens.weight":
        return "token_embd.weight"
    if tensor == "model.norm.weight":
        return "output_norm.weight"
    layer, _, part = tensor.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_PARTS[part.removesuffix('.weight')]}.weight"


def in_pairs(array: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows of each head in the order 0, D / 2, 1, D / 2 + 1, …, for a rotation of neighbours."""
    halves = array.reshape(-1, 2, head_dim // 2, array.shape[1])  # [H, 2, D / 2, E]
    return halves.swapaxes(1, 2).reshape(array.shape)


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
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
    is_embedding = tensor == "model.embed_tokens.weight"
    return gguf.GGMLQuantizationType["Q8_0" if is_embedding and wanted != "BF16" else wanted]


def main(folder: Path, out: Path, wanted: str = "BF16") -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    add_shape(writer, config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted}"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    add_tokenizer(writer, tokenizer, config["vocab_size"])
    weights = open_weights(folder)
    for name in sorted(weights):
        if weights[name].ndim == 1:
            writer.add_tensor(name_of(name), weights[name].astype(np.float32))
        else:
            array = weights[name]
            if name.endswith((".q_proj.weight", ".k_proj.weight")):
                array = in_pairs(array, config["head_dim"])
            kind = type_of(name, wanted)
            raw = gguf.quantize(np.asarray(array, np.float32), kind)
            writer.add_tensor(name_of(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
