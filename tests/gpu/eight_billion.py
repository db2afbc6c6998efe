"""Writes a model of Llama-3.1-8B's shape, whose layers all have the same random weights.

    python -m tests.gpu.eight_billion FOLDER [LAYERS]

Random numbers for one layer take seconds, those for all would take minutes, and the time of a step
does not depend on them.
"""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cadenza.bench.checkpoints import write_random_tokenizer
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.checkpoint.tokenizer_files import TOKENIZER_FILE
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from tests.checkpoint.config_writer import format_model_config

LAYER = "model.layers."


def shape_of_8b(num_layers: int = 32) -> ModelConfig:
    """Llama-3.1-8B's, from that of the 1B model of its family."""
    return replace(
        named_shape("llama-3.2-1b"),
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=num_layers,
        head_dim=128,
        rope=replace(named_shape("llama-3.2-1b").rope, rotary_dim=128),
        tie_word_embeddings=False,
    )


def write(folder: Path, model: ModelConfig) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(8)
    drawn: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for spec in declare(model):
        name = spec.name
        kind = name.split(".", 3)[-1] if name.startswith(LAYER) else name
        if kind not in drawn:
            drawn[kind] = _draw(generator, spec.kind, spec.shape)
        tensors[name] = drawn[kind]
    _write_safetensors(folder / "model.safetensors", tensors)
    text = json.dumps(format_model_config(replace(model, dtype="bfloat16")))
    (folder / "config.json").write_text(text + "\n")
    write_random_tokenizer(folder / TOKENIZER_FILE, model.vocab_size)


def _draw(generator: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    if kind == "norm":
        return np.ones(shape, ml_dtypes.bfloat16)
    wide = generator.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return wide.astype(ml_dtypes.bfloat16)


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    header, start = dict[str, Any](), 0
    for name, each in tensors.items():
        offsets = [start, start + each.nbytes]
        header[name] = {"dtype": "BF16", "shape": each.shape, "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in tensors.values():
            file.write(each.view(np.uint8).data)


if __name__ == "__main__":
    write(Path(sys.argv[1]), shape_of_8b(*map(int, sys.argv[2:])))
    print(json.dumps({"written": sys.argv[1]}))
