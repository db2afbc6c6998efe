"""Describes a model folder, whether it can be loaded or not, for `cadenza info`: `survey_folder`.
Raises nothing, and reads only small files and headers."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

from cadenza.errors import CheckpointError
from cadenza.json_object import is_finite_number, read_json_object
from cadenza.models.config_json import CONFIG_FILE
from cadenza.weights.weights import open_weights

MAX_FILES = 64
MAX_TEXT = 80

_SHOWN_KEYS = (
    "model_type architectures dtype torch_dtype num_hidden_layers hidden_size intermediate_size "
    "num_attention_heads num_key_value_heads head_dim vocab_size max_position_embeddings "
    "tie_word_embeddings"
).split()


def survey_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """The main settings of config.json, file sizes in bytes, and totals of the stored tensors."""
    return {
        "stated": _read_settings(folder),
        "files": list_files(folder),
        "tensors": _tensors(folder),
    }


def list_files(folder: Path) -> dict[str, int]:
    """Name to size in bytes of a folder's first `MAX_FILES` files, sorted by name."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())[:MAX_FILES]
        return {path.name[:MAX_TEXT]: path.stat().st_size for path in paths}
    except OSError:
        return {}


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        config = read_json_object(folder / CONFIG_FILE)
    except CheckpointError:
        return {}
    values = {name: _scalar(config.get(name)) for name in _SHOWN_KEYS}
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
    entries = list(weights.tensors.values())
    return {
        "count": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "dtypes": dict(Counter(entry.stored_type for entry in entries)),
    }
