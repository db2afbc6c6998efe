"""GGUF files of models that see, written through gguf-py: a text model, and its tower beside it.

Owns llama.cpp's side of the conversion: tensor names from gguf-py's own table, metadata as given.
Knows nothing of the reader under test.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.declaration import declare
from tests.checkpoint.gguf_models import Arrays, Conversion, add_value, describe, rename

TOKENS = "tokenizer.ggml.tokens"


def write_text(model: Checkpoint, architecture: str, path: Path, tokens: Mapping[int, str]) -> Path:
    """The text model of a folder; its vocabulary has the `tokens` given, and others without a
    meaning."""
    config = replace(model.config, vision=None)
    arrays = {spec.name: floats(model, spec.name) for spec in declare(config)}
    words = [tokens.get(index, f"<{index}>") for index in range(config.vocab_size)]
    conversion = Conversion(
        architecture=architecture,
        metadata=describe(architecture, config),
        others={"tokenizer.ggml.model": "gpt2", TOKENS: words},
        tensors=rename(architecture, config, arrays),
        original=model.folder,
    )
    return conversion.write(path)


def write_tower(
    model: Checkpoint,
    path: Path,
    metadata: Mapping[str, Any],
    *,
    tensors: Arrays | None = None,
    kind: str = "F32",
) -> Path:
    """The tower of a folder, with linears of layers in a type; `tensors` by GGUF's names in place
    of those that gguf-py's table gives."""
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, array in (named_tensors(model) if tensors is None else tensors).items():
        is_plain = array.ndim != 2 or "position_embd" in name
        code = gguf.GGMLQuantizationType["F32" if is_plain else kind]
        stored = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), code)
        writer.add_tensor(name, stored, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named_tensors(model: Checkpoint) -> Arrays:
    """The tensors of a model's tower by gguf-py's names."""
    vision = model.config.vision
    assert vision is not None
    text = {spec.name for spec in declare(replace(model.config, vision=None))}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.tower.num_layers)
    found: Arrays = {}
    for spec in declare(model.config):
        if spec.name not in text:
            name = table.get_name(spec.name, try_suffixes=(".weight", ".bias"))
            assert name is not None, spec.name
            found[name] = floats(model, spec.name)
    return found


def floats(model: Checkpoint, name: str) -> np.ndarray:
    return np.asarray(model.weights[name]).astype(np.float32)


def same_models(one: Path, other: Path) -> None:
    """Both see with the same settings, and the same values in all tensors of their towers."""
    ours, theirs = open_checkpoint(one), open_checkpoint(other)
    assert ours.config.vision == theirs.config.vision
    text = {spec.name for spec in declare(replace(ours.config, vision=None))}
    for spec in declare(ours.config):
        if spec.name not in text:
            assert np.array_equal(floats(ours, spec.name), floats(theirs, spec.name)), spec.name
