"""Finds and opens the files of a GGUF model: `find_gguf`, `open_gguf_files`. Owns the names of a
model in several files, and which file of a folder is meant. All files of a model lie in one folder,
and no tensor is in two of them."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from cadenza.checkpoint.gguf.reader import MAX_TENSORS, GGUFFile, open_gguf
from cadenza.errors import CheckpointError
from cadenza.json_object import shorten

SUFFIX = ".gguf"
MAX_SPLITS = 4096
MAX_LISTED = 12

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# image projectors, statistics and adapters, which lie beside models
_NO_MODEL = re.compile(r"mmproj|imatrix|(^|[-_.])lora([-_.]|$)", re.IGNORECASE)


_PROJECTOR_TYPES = ("f16", "bf16", "q8_0", "f32")


def is_gguf_name(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def first_files(names: Iterable[str]) -> list[str]:
    """Those of the names that stand for a model: whole files, and the first of several."""
    found: list[str] = []
    for name in sorted(names):
        split = _SPLIT.fullmatch(name)
        is_first = split is None or int(split["number"]) == 1
        if is_gguf_name(name) and is_first and not _NO_MODEL.search(name.rpartition("/")[2]):
            found.append(name)
    return found


def split_names(name: str) -> list[str]:
    """The names of all files of the model that the file `name` belongs to, in order. Raises
    CheckpointError if the name claims more files than are supported."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [name]
    count = int(split["count"])
    if not 1 <= int(split["number"]) <= count <= MAX_SPLITS:
        raise CheckpointError(
            f"{name} claims to be part {int(split['number'])} of {count}; supported are up to "
            f"{MAX_SPLITS} parts, numbered from 1"
        )
    return [f"{split['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def find_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder; None if it has none. Raises CheckpointError if it has several."""
    try:
        names = first_files(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise CheckpointError(f"the folder {folder.name} cannot be read") from error
    if len(names) > 1:
        more = "" if len(names) <= MAX_LISTED else f" and {len(names) - MAX_LISTED} more"
        raise CheckpointError(
            f"the folder {folder.name} has {len(names)} GGUF models: "
            f"{', '.join(names[:MAX_LISTED])}{more}; name one of the files"
        )
    return folder / names[0] if names else None


def choose_gguf(names: Collection[str], selector: str | None, *, where: str, model: str) -> str:
    """The GGUF model that a selector names among a repository's files; the only one for None. A
    selector is a file's name, with or without .gguf, or one of the parts of its path between
    `-`, `.` and `/`, such as Q4_K_M, in any case. Raises CheckpointError if none matches, or
    several do."""
    found = first_files(names)
    matching = found if selector is None else [name for name in found if _matches(name, selector)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join((matching or found)[:MAX_LISTED])
    if not found:
        raise CheckpointError(
            f"{where} has no GGUF files; leave out :{selector} or choose another model"
        )
    if matching:
        raise CheckpointError(
            f"{where} has {len(matching)} GGUF models"
            f"{'' if selector is None else f' of the name {selector}'}: {listed}; choose one by a "
            f"part of its name, such as {model}:Q4_K_M, or by all of it"
        )
    raise CheckpointError(f"{where} has no GGUF model {selector}; it has {listed}")


def choose_projector(names: Iterable[str], model: str) -> str | None:
    """The file of a repository with the tower of the GGUF model `model`: in the same folder, 16
    bits first where there are several types; None if there is none."""
    folder = model.rpartition("/")[0]
    found = [
        name
        for name in sorted(names)
        if name.rpartition("/")[0] == folder and is_gguf_name(name) and "mmproj" in name.lower()
    ]
    for kind in _PROJECTOR_TYPES:
        part = re.compile(rf"(^|[-./_]){kind}($|[-./_])", re.IGNORECASE)
        for name in found:
            if part.search(name):
                return name
    return found[0] if found else None


def _matches(name: str, selector: str) -> bool:
    split = _SPLIT.fullmatch(name)
    stem = (split["stem"] if split else name[: -len(SUFFIX)]).lower()
    wanted = selector.lower().removesuffix(SUFFIX)
    file = name.lower().rpartition("/")[2].removesuffix(SUFFIX)
    part = re.compile(rf"(^|[-./]){re.escape(wanted)}($|[-./])")
    return wanted in (file, stem.rpartition("/")[2]) or part.search(stem) is not None


def open_gguf_files(path: Path) -> tuple[GGUFFile, ...]:
    """Opens a file and, if it is one of several of a model, the others; the first has the metadata.
    Raises CheckpointError if a file is missing or invalid, or they do not belong together."""
    names = split_names(path.name)
    absent = [name for name in names if not (path.parent / name).exists()]
    if absent:
        raise CheckpointError(
            f"{path.name} is one of {len(names)} files, of which {len(absent)} are missing, such "
            f"as {absent[0]}; fetch all into one folder"
        )
    files = tuple(open_gguf(path.parent / name) for name in names)
    _check_splits(files)
    return files


def _check_splits(files: tuple[GGUFFile, ...]) -> None:
    seen: set[str] = set()
    for number, file in enumerate(files):
        metadata, name = file.header.metadata, file.mapped.name
        count = metadata.integer("split.count", 0, MAX_SPLITS, 1) or 1
        if count != len(files) or metadata.integer("split.no", 0, MAX_SPLITS, 0) != number:
            raise CheckpointError(
                f"{name}: split.no and split.count are {shorten(metadata.get('split.no'))} "
                f"and {shorten(metadata.get('split.count'))}; by its name it is part {number + 1} "
                f"of {len(files)}; give the files their own names, as in "
                f"model-00001-of-00003.gguf"
            )
        twice = seen.intersection(file.header.tensors)
        if twice:
            raise CheckpointError(
                f"{name} contains tensor {shorten(min(twice))}, as does a file before it; "
                f"fetch the files again"
            )
        seen.update(file.header.tensors)
    total = files[0].header.metadata.integer("split.tensors.count", 0, MAX_TENSORS, len(seen))
    if total != len(seen):
        raise CheckpointError(
            f"{files[0].mapped.name}: split.tensors.count is {total}, but the {len(files)} files "
            f"have {len(seen)} tensors; fetch them again"
        )
