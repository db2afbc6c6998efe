"""The folder that `cadenza export` writes: a model folder as any command takes it. Its tensors have
the type that the modules compute in and lie in the order of the parameters, so that each parameter
is one range of a file, which processes map and share."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cadenza.backends.iree.manifest import FOLDER, MADE_FILE, MANIFEST_FILE, Manifest
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.new_folder import copy_small_files, writing_folder
from cadenza.exporting.export import ExportOptions, Modules, OnCompiled, make_modules
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.declaration import declare
from cadenza.weights.dtypes import FORMAT_OF_NAME, StoredDType
from cadenza.weights.safetensors_writer import NewTensor, Part, write_shards


def export_folder(
    checkpoint: Checkpoint,
    out: Path,
    options: ExportOptions,
    on_compiled: OnCompiled = lambda _: None,
) -> Modules:
    """Writes a new folder and returns the modules. Raises CheckpointError, ConfigError."""
    with writing_folder(out) as folder:
        modules = make_modules(checkpoint, options, on_compiled)
        write_model(checkpoint, modules, folder)
    return modules


def write_model(checkpoint: Checkpoint, modules: Modules, folder: Path) -> None:
    """Into an empty folder. Raises OSError."""
    copy_small_files(checkpoint.folder, folder)
    shutil.copyfile(checkpoint.folder / CONFIG_FILE, folder / CONFIG_FILE)
    write_shards(folder, list(_parts(checkpoint, modules.manifest)))
    write_modules(modules, folder)


def write_modules(modules: Modules, folder: Path) -> None:
    """Writes the modules, their manifest and the parameters that are no tensors. Raises OSError."""
    inner = folder / FOLDER
    inner.mkdir(exist_ok=True)
    for name, content in modules.files.items():
        (inner / name).write_bytes(content)
    if modules.made:
        parts = [_part([(name, value.dtype.name, value)]) for name, value in modules.made.items()]
        write_shards(inner, parts)
        (inner / "model.safetensors").replace(inner / MADE_FILE)
    (inner / MANIFEST_FILE).write_bytes(encode_manifest(modules.manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _parts(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Part]:
    """The tensors of each parameter together, then those of no parameter."""
    weights, written = checkpoint.weights, set[str]()
    groups = [(each.tensors, each.array.dtype) for each in manifest.parameters]
    groups += [((spec.name,), manifest.dtype) for spec in declare(checkpoint.config)]
    for names, dtype in groups:
        new = [name for name in names if name not in written]
        written.update(new)
        if new:
            yield _part([(name, dtype, weights.array(name)) for name in new])


def _part(tensors: list[tuple[str, str, Any]]) -> Part:
    stored = {each.name: each for each in FORMAT_OF_NAME.values()}
    new = [
        NewTensor(name=name, dtype=_stored(dtype), shape=array.shape)
        for name, dtype, array in tensors
    ]
    return Part(
        tensors=tuple(new),
        make=lambda: (
            np.asarray(array).astype(stored[_stored(dtype)].numpy) for _, dtype, array in tensors
        ),
    )


def _stored(dtype: str) -> StoredDType:
    return next(name for name in FORMAT_OF_NAME if name == dtype)
