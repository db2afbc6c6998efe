"""How a checkpoint's embeddings are pooled, by its sentence-transformers files: `DefaultPooling`. A
checkpoint whose embeddings are made in an unknown way has no default; no file here keeps a model
from being opened."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, read_json_object, read_small_file, shorten
from cadenza.request import Pooling

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
MAX_MODULES_BYTES = 1 << 16

_MODES: dict[str, Pooling | None] = {
    "pooling_mode_cls_token": None,
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": None,
}
_NAMED_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_MEAN = "pooling_mode_mean_tokens"
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPooling:
    """The pooling of requests that name none; None, because of `reason`, if they must name one."""

    pooling: Pooling | None = "last"
    reason: str = ""


def read_default_pooling(folder: Path) -> DefaultPooling:
    """None of a folder without such files."""
    try:
        return _read(folder)
    except CheckpointError as error:  # generation needs none of them
        return DefaultPooling(pooling=None, reason=str(error))


def _read(folder: Path) -> DefaultPooling:
    """Raises CheckpointError."""
    odd = _odd_module(folder / MODULES_FILE)
    if odd is not None:
        reason = f"{MODULES_FILE} has the module {shorten(odd)}, which is not built"
        return DefaultPooling(pooling=None, reason=reason)
    path = folder / POOLING_FILE
    return _pooling_of(read_json_object(path)) if path.exists() else DefaultPooling()


def _pooling_of(config: JsonObject) -> DefaultPooling:
    named = config.text("pooling_mode")
    if named is not None:
        modes = [named]
        pooling = _NAMED_MODES.get(named)
    else:
        modes = [mode for mode in _MODES if config.flag(mode, mode == _MEAN)]
        pooling = _MODES[modes[0]] if len(modes) == 1 else None
    if pooling is not None:
        return DefaultPooling(pooling=pooling)
    shown = " and ".join(map(shorten, modes)) or "no pooling"
    return DefaultPooling(
        pooling=None, reason=f"{POOLING_FILE} asks for {shown}, which is not built"
    )


def _odd_module(path: Path) -> str | None:
    """The type of a module that changes embeddings in another way than pooling does."""
    if not path.exists():
        return None
    try:
        modules: object = json.loads(read_small_file(path, max_bytes=MAX_MODULES_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON; fetch the file again") from error
    listed = cast(list[object], modules) if isinstance(modules, list) else [modules]
    for module in listed:
        known = cast(dict[str, object], module) if isinstance(module, dict) else {}
        kind = known.get("type")
        if not isinstance(kind, str):
            shown = shorten(cast(object, module))
            raise CheckpointError(f"{path.name} holds {shown}; it must list modules")
        if kind.rpartition(".")[2] not in _MODULES:
            return kind
    return None
