"""Writes a run's weights as the bundled checkpoint, in Hugging Face layout and bfloat16.

Files are replaced atomically, so readers never see an incomplete one.

Run as `python -m training.export` from the root of the repository.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from training.corpus.example import END_OF_TEXT, TURN_END
from training.exported import MODULES
from training.model import ModelShape, Weights
from training.tokenizer import BUNDLED, load_tokenizer
from training.train import RUN_FOLDER, load_weights


def export(weights: Weights, shape: ModelShape, folder: Path) -> None:
    tensors = dict(_named_tensors(weights, shape))
    temporary = folder / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, folder / "model.safetensors")
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", _generation_config())


def _named_tensors(weights: Weights, shape: ModelShape) -> Iterator[tuple[str, np.ndarray]]:
    def shipped(array: Any) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(array).T.astype(ml_dtypes.bfloat16))

    yield "model.embed_tokens.weight", shipped(weights["embed"].T)
    for index in range(shape.num_hidden_layers):
        for name, module in MODULES.items():
            yield f"model.layers.{index}.{module}.weight", shipped(weights["layers"][name][index])
    yield "model.norm.weight", shipped(weights["norm"])


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": _token_id(TURN_END),
        "pad_token_id": _token_id(END_OF_TEXT),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "eos_token_id": [_token_id(TURN_END), _token_id(END_OF_TEXT)],
        "pad_token_id": _token_id(END_OF_TEXT),
        "do_sample": False,
    }


def _token_id(token: str) -> int:
    token_id = load_tokenizer().token_to_id(token)
    assert token_id is not None
    return token_id


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=RUN_FOLDER)
    parser.add_argument("--folder", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    shape = ModelShape()
    export(load_weights(arguments.run, shape), shape, arguments.folder)


if __name__ == "__main__":
    main()
