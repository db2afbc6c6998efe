"""What a folder holds, whether it can be loaded or not: `survey_folder`.

Owns the facts that are told of a refused checkpoint. Knows no family. Invariant: it raises nothing,
reads small files and headers only, and says nothing that a file does not.
"""

from collections import Counter
from pathlib import Path
from typing import Any, cast

from cadenza.checkpoint.json_object import is_finite_number, read_json_object
from cadenza.checkpoint.weights import open_weights
from cadenza.errors import CheckpointError

MAX_FILES = 64
MAX_TEXT = 80

_TOLD = (
    "model_type architectures dtype torch_dtype num_hidden_layers hidden_size intermediate_size "
    "num_attention_heads num_key_value_heads head_dim vocab_size max_position_embeddings "
    "tie_word_embeddings"
).split()


def survey_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """What config.json states, the files with their bytes, and the tensors as they are stored."""
    return {
        "stated": _stated(folder),
        "files": list_files(folder),
        "tensors": _tensors(folder),
    }


def list_files(folder: Path) -> dict[str, int]:
    """The first files of a folder by name, with their bytes."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())[:MAX_FILES]
        return {path.name[:MAX_TEXT]: path.stat().st_size for path in paths}
    except OSError:
        return {}


def _stated(folder: Path) -> dict[str, Any]:
    try:
        config = read_json_object(folder / "config.json")
    except CheckpointError:
        return {}
    values = {name: _scalar(config.get(name)) for name in _TOLD}
    return {name: value for name, value in values.items() if value is not None}


def _scalar(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(str(item)[:MAX_TEXT] for item in cast(list[object], value)[:4])
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, bool):
        return value
    return value if is_finite_number(value) and abs(value) < 1 << 63 else None


def _tensors(folder: Path) -> dict[str, Any]:
    try:
        weights = open_weights(folder)
    except CheckpointError:
        return {}
    entries = [weights.entry(name) for name in weights]
    return {
        "count": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "dtypes": dict(Counter(entry.dtype for entry in entries)),
    }
