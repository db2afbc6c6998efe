"""Turns a GGUF file into a folder in the Hugging Face layout, with its weights dequantised.

Owns config.json, generation_config.json and model.safetensors for the architectures that
`tools.real_models` uses; `tools.gguf_tokenizer` writes the tokenizer's files. A stopgap until
Cadenza reads GGUF directly. Invariant: unknown metadata of the architecture is refused, each tensor
of the file is written exactly once, and the weights are the exact float32 values of the file's
blocks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.tensor_spec import TensorSpec
from tools.gguf_tokenizer import GGUFError, write_tokenizer

Float32Array = npt.NDArray[np.float32]

# Layers 6, 12, … attend to the full context. The metadata has neither this number nor
# `GEMMA3_WINDOW_THETA`; llama.cpp has both in its source.
GEMMA3_FULL_EVERY = 6

GEMMA3_WINDOW_THETA = 10_000.0

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA_LAYER = {**_LAYER, "post_attention_layernorm": "ffn_norm"}
_GEMMA3_LAYER = {
    **_LAYER,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_COMMON_KEYS = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """An open GGUF file: its metadata and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def number(self, key: str, default: float | None = None) -> Any:
        """A number of the architecture's metadata; a float32 as its shortest decimal."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise GGUFError(f"the file has no {self.architecture}.{key}")
        return value if isinstance(value, int) else float(str(np.float32(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """How llama.cpp stores one architecture.

    Attributes:
        config: its config.json entries beyond the common ones.
        layer: Hugging Face name to GGUF name of a layer's tensors.
        keys: metadata keys allowed beyond `_COMMON_KEYS`.
        restore: reverts llama.cpp's transformation of a tensor.
    """

    config: Callable[[GGUFFile], dict[str, object]]
    layer: Mapping[str, str]
    keys: frozenset[str] = frozenset()
    restore: Callable[[Float32Array, TensorSpec, ModelConfig], Float32Array]


def write_folder(path: Path, folder: Path) -> None:
    """Writes the model of the GGUF file `path` into the new folder `folder`.

    Raises:
        GGUFError: the file has something that is not supported.
        OSError: the file cannot be read, or the folder cannot be written.
    """
    file = _open(path)
    architecture = _known_architecture(file)
    folder.mkdir(parents=True)
    config = {**_common_config(file), **architecture.config(file)}
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in _SPECIAL_IDS if key in config}
    _write_json(folder / "generation_config.json", special)
    write_tokenizer(file.metadata, folder)
    _write_weights(file, architecture, parse_model_config(config), folder / "model.safetensors")
    open_checkpoint(folder)


def _open(path: Path) -> GGUFFile:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return GGUFFile(metadata=metadata, tensors={each.name: each for each in reader.tensors})


def _known_architecture(file: GGUFFile) -> _Architecture:
    known = _ARCHITECTURES.get(file.architecture)
    if known is None:
        names = ", ".join(_ARCHITECTURES)
        raise GGUFError(f"the architecture {file.architecture} is not one of {names}")
    prefix = f"{file.architecture}."
    stated = {name.removeprefix(prefix) for name in file.metadata if name.startswith(prefix)}
    unknown = sorted(stated - _COMMON_KEYS - known.keys)
    if unknown:
        raise GGUFError(
            f"{prefix}{unknown[0]} may change what the model computes and is not supported; "
            f"add it to tools/gguf_folder.py"
        )
    head_dim = _head_dim(file)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.number(key, head_dim) != head_dim:
            raise GGUFError(f"{prefix}{key} differs from the head size {head_dim}")
    return known


def _head_dim(file: GGUFFile) -> int:
    per_head = file.number("embedding_length") // file.number("attention.head_count")
    return file.number("attention.key_length", per_head)


_SPECIAL_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def _common_config(file: GGUFFile) -> dict[str, object]:
    """The entries that all architectures share; `dtype` is the default for computing."""
    ids = {key: file.metadata[name] for key, name in _SPECIAL_IDS.items() if name in file.metadata}
    return {
        "dtype": "bfloat16",
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": file.number("attention.head_count"),
        "num_key_value_heads": file.number(
            "attention.head_count_kv", file.number("attention.head_count")
        ),
        "head_dim": _head_dim(file),
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **ids,
    }


def _llama_config(file: GGUFFile) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": _plain_rope(file.number("rope.freq_base", 10_000.0)),
    }


def _gemma3_config(file: GGUFFile) -> dict[str, object]:
    """Attention scores are scaled by the head size, except in the largest model (62 layers)."""
    num_layers = file.number("block_count")
    if num_layers == 62:
        raise GGUFError("Gemma 3 27B scales its attention scores differently; it is not supported")
    kinds = [
        "full_attention" if (layer + 1) % GEMMA3_FULL_EVERY == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _head_dim(file),
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": kinds,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": _plain_rope(file.number("rope.freq_base", 1_000_000.0)),
            "sliding_attention": _plain_rope(GEMMA3_WINDOW_THETA),
        },
    }


def _plain_rope(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


def _halves_from_pairs(array: Float32Array, spec: TensorSpec, config: ModelConfig) -> Float32Array:
    """Reorders query and key rows: llama.cpp rotates adjacent pairs, Hugging Face two halves."""
    if not spec.name.endswith((".q_proj.weight", ".k_proj.weight")):
        return array
    pairs = array.reshape(-1, config.head_dim // 2, 2, spec.shape[1])  # [H, D / 2, 2, E]
    return pairs.swapaxes(1, 2).reshape(spec.shape)


def _norms_without_one(array: Float32Array, spec: TensorSpec, _: ModelConfig) -> Float32Array:
    """Subtracts 1 from norms: Gemma multiplies by 1 + weight, and llama.cpp stores the sum."""
    return array - np.float32(1.0) if spec.kind == "norm" else array


_ARCHITECTURES = {
    "llama": _Architecture(config=_llama_config, layer=_LLAMA_LAYER, restore=_halves_from_pairs),
    "gemma3": _Architecture(
        config=_gemma3_config,
        layer=_GEMMA3_LAYER,
        keys=frozenset({"attention.sliding_window"}),
        restore=_norms_without_one,
    ),
}


def _write_weights(
    file: GGUFFile, architecture: _Architecture, config: ModelConfig, path: Path
) -> None:
    specs = declare(config)
    names = {spec.name: _name_in_gguf(spec.name, architecture) for spec in specs}
    unlike = sorted(set(names.values()) ^ set(file.tensors))
    if unlike:
        fault = "is not expected" if unlike[0] in file.tensors else "is missing"
        raise GGUFError(f"the tensor {unlike[0]} {fault} in this model ({len(unlike)} such)")
    with path.open("wb") as output:
        output.write(_safetensors_header(specs))
        for spec in specs:
            array = _dequantise(file.tensors[names[spec.name]], spec)
            output.write(architecture.restore(array, spec, config).astype("<f4").tobytes())


def _name_in_gguf(name: str, architecture: _Architecture) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{architecture.layer[place]}.{kind}"


def _dequantise(tensor: gguf.ReaderTensor, spec: TensorSpec) -> Float32Array:
    array = quants.dequantize(tensor.data, tensor.tensor_type)
    if array.shape != spec.shape:
        raise GGUFError(
            f"the tensor {tensor.name} has the shape {array.shape}; {spec.shape} is declared"
        )
    return array.astype(np.float32, copy=False)


def _safetensors_header(specs: tuple[TensorSpec, ...]) -> bytes:
    table: dict[str, object] = {}
    for spec, (start, stop) in zip(specs, _places(specs), strict=True):
        table[spec.name] = {"dtype": "F32", "shape": spec.shape, "data_offsets": [start, stop]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _places(specs: tuple[TensorSpec, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for spec in specs:
        stop = start + spec.num_elements * 4
        yield start, stop
        start = stop


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
