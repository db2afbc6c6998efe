"""Opens a model by its path, or a bundled one: `open_checkpoint`, which knows which reader a path
is for; `survey_folder` describes a folder for `cadenza info`, whether it can be loaded or not."""

import re
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any, cast

from cadenza.checkpoint.folder import Checkpoint, open_folder
from cadenza.checkpoint.gguf.files import find_gguf, is_gguf_name
from cadenza.checkpoint.gguf.model import open_gguf_model
from cadenza.checkpoint.gguf.reader import MAGIC as GGUF_MAGIC
from cadenza.checkpoint.hub_cache import main_snapshot
from cadenza.config import PACKAGED_MODELS
from cadenza.errors import CheckpointError
from cadenza.json_object import is_finite_number, read_json_object
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.towers.reader import VisionOptions
from cadenza.weights.safetensors_file import INDEX_FILE, SINGLE_FILE
from cadenza.weights.weights import adapter_in, open_weights

MAX_ENTRIES = 1000
MAX_NAMED = 4  # of a folder: entries that are looked at, and folders that an error names

_OLLAMA_NAME = re.compile(r"[\w.-]{1,80}:[\w.-]{1,80}", re.ASCII)

_MODELS, _BUNDLED, _BUNDLED_DRAFT = "models", "bundled", "bundled-draft"


def open_checkpoint(
    path: Path | None,
    *,
    revision: str | None = None,
    any_family: bool = False,
    vision: VisionOptions | None = None,
) -> Checkpoint:
    """Opens a local folder or GGUF file, or one of `PACKAGED_MODELS`; None is the bundled model. A
    folder of the hub's cache is its main snapshot. The options are those of `open_folder`. Raises
    CheckpointError if the path does not exist, or its content is invalid or not supported."""
    path = None if path is None else main_snapshot(path)
    file = None if path is None else _gguf_file(path)
    if path is not None and file is not None:
        beside = path if path.is_dir() else None
        return open_gguf_model(file, revision=revision, beside=beside, vision=vision)
    if path is None or (str(path) in PACKAGED_MODELS and not path.exists()):
        folder = _packaged_folder(_BUNDLED if path is None else str(path))
    else:
        folder = _local_folder(path)
    return open_folder(folder, revision=revision, any_family=any_family, vision=vision)


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or that lies in a folder without safetensors weights. Ollama
    keeps such files under names without a suffix."""
    if path.is_dir():
        has_weights = any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
        return None if has_weights else find_gguf(path)
    is_gguf = path.is_file() and (is_gguf_name(path.name) or _begins_as_gguf(path))
    return path if is_gguf else None


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def open_bundled_draft(target: Checkpoint) -> Checkpoint:
    """The draft model in the package. Raises CheckpointError if `target` is not the bundled model,
    for which it drafts, or this installation has none."""
    folder = _packaged(_BUNDLED_DRAFT)
    if target.folder.resolve() != _packaged(_BUNDLED).resolve():
        raise CheckpointError(
            "the one in the package drafts for the bundled model only; name another, as in "
            '{"method": "draft_model", "model": "small-model"}'
        )
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError("this installation has none for the bundled model; name another")
    return open_checkpoint(folder)


def _packaged_folder(name: str) -> Path:
    folder = _packaged(name)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"this installation has no model {name!r}; name a local model folder instead"
        )
    return folder


def _packaged(name: str) -> Path:
    return Path(str(resources.files("cadenza").joinpath(_MODELS, name)))


def _local_folder(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{_absent(path)}; name a folder with config.json and safetensors weights, a GGUF file "
            f"(.gguf), or a hub model as owner/model{_advice_on_name(str(path))}"
        )
    if not (path / CONFIG_FILE).exists():
        adapter = adapter_in(path)
        if adapter is not None:
            raise CheckpointError(adapter)
        raise CheckpointError(
            f"the folder {str(path)!r} {_lack_of(path)}; name a folder in the Hugging Face layout, "
            f"or one with a GGUF file"
        )
    return path


def _absent(path: Path) -> str:
    if path.exists():
        return f"the file {str(path)!r} is no model: it is not in the GGUF format"
    if is_gguf_name(path.name):
        return f"the GGUF file {str(path)!r} does not exist"
    what = "model" if _OLLAMA_NAME.fullmatch(str(path)) else "model folder"
    return f"the {what} {str(path)!r} does not exist"


def _lack_of(path: Path) -> str:
    """What a folder has in place of a model: nothing, folders of models, or other files."""
    try:
        entries = sorted(path.iterdir())[:MAX_ENTRIES]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    models = [each.name for each in entries if (each / CONFIG_FILE).exists()]
    if models:
        return f"has no {CONFIG_FILE}, but its folders {', '.join(models[:MAX_NAMED])} have one"
    return f"has no {CONFIG_FILE}" if entries else "is empty"


def _advice_on_name(name: str) -> str:
    if _OLLAMA_NAME.fullmatch(name) is None:
        return ""
    return (
        f"; {name} is how Ollama names models: `ollama show --modelfile {name}` prints the file "
        f"of such a model (FROM ...), a GGUF file that can be named here"
    )


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
