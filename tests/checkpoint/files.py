"""Safetensors files built byte by byte, so that tests can make each byte a lie."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import HEAD, declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weight_format import FORMAT_OF_CODE
from cadenza.weights.weights import open_weights

Header = dict[str, Any]

SMALL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 13,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def encode_file(header: object, data: bytes, *, claimed_length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if claimed_length is None else claimed_length
    return length.to_bytes(8, "little") + text + data


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> tuple[Header, bytes]:
    codes = {format.numpy: code for code, format in FORMAT_OF_CODE.items()}
    header: Header = {}
    data = b""
    for name, array in tensors.items():
        stop = len(data) + array.nbytes
        header[name] = {
            "dtype": codes[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), stop],
        }
        data += array.tobytes()
    return header, data


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    path.write_bytes(encode_file(*encode_tensors(tensors)))


def small_model() -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """A config and tensors that fit it; each element differs from the others."""
    config = parse_model_config(SMALL_CONFIG)
    tensors: dict[str, np.ndarray] = {}
    first = 0
    for spec in declare(config):
        numbers = np.arange(first, first + spec.num_elements, dtype=np.float32)
        tensors[spec.name] = numbers.reshape(spec.shape)
        first += spec.num_elements
    return config, tensors


def write_folder(folder: Path, files: Mapping[str, object] | None = None) -> Path:
    """A complete small checkpoint; `files` are written over it: text, bytes, or JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG))
    write_tensors(folder / "model.safetensors", small_model()[1])
    for name, content in (files or {}).items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif isinstance(content, str):
            (folder / name).write_text(content)
        else:
            (folder / name).write_text(json.dumps(content))
    return folder


def write_base_model(folder: Path, source: Path) -> Path:
    """The model in `source` as transformers writes its base model: no prefix, and no head."""
    folder.mkdir()
    weights = open_weights(source)
    write_tensors(
        folder / "model.safetensors",
        {name.removeprefix("model."): weights[name] for name in weights if name != HEAD},
    )
    config = json.loads((source / "config.json").read_text())
    (name,) = config["architectures"]
    config["architectures"] = [name.replace("ForCausalLM", "Model")]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
