"""The tensors of a folder by name, from one safetensors file or several: `Weights`, and `by_rules`,
names of stored tensors as the declared ones. Every file lies directly in the folder, and a name
refers to exactly one tensor or quantised weight."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, read_json_object, shorten
from cadenza.weights.safetensors_file import INDEX_FILE, MTP_FILE, SINGLE_FILE, open_safetensors
from cadenza.weights.stored_tensor import (
    AnyArray,
    MappedFile,
    Stored,
    StoredScheme,
    StoredTensor,
    StoredWeight,
)
from cadenza.weights.weight_format import WeightFormat

ADAPTER_FILE = "adapter_config.json"
MERGE = "merge it into its base (peft's `merge_and_unload`) and name the result, or name the base"

MAX_INDEX_BYTES = 16 << 20
MAX_SHARDS = 4096

_OTHER_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


@dataclass(slots=True, eq=False)
class Weights:
    """Tensors by name, as read-only views of mapped files; pages are read on first access. A weight
    that is stored quantised has its own name in place of the tensors that it is stored in."""

    files: tuple[MappedFile, ...]
    tensors: Mapping[str, Stored]
    scheme: StoredScheme | None = None
    _on_read: Callable[[str], object] = lambda _: None

    def __getitem__(self, name: str) -> Any:
        """A zero-copy view of a stored tensor, or a `CodedWeight`, read on each access. Here and
        below raises `KeyError` for unknown names."""
        self._on_read(name)
        return self.tensors[name].load()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def release_pages(self) -> None:
        """Makes no page of the files resident in this process; views read them again on access."""
        for file in self.files:
            file.release_pages()

    def released_by_layer(self) -> "Weights":
        """A copy that releases the mapped pages before it reads another layer, for loads in the
        order of layers: file and result are then not both resident, and the system can take back
        the file's part of the page cache."""
        layer: list[str] = [""]

        def release(name: str) -> None:
            self._on_read(name)
            parts = name.split(".")
            own = next((part for part in parts if part.isdecimal()), "")
            if own != layer[0]:
                layer[0] = own
                self.release_pages()

        return self.watched(release)

    def entry(self, name: str) -> StoredTensor:
        """A tensor that is not a quantised weight."""
        found = self.tensors[name]
        assert isinstance(found, StoredTensor), f"{name} is stored in tensors of other names"
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def stored_type(self, name: str) -> str:
        """How a tensor or quantised weight is stored."""
        return self.tensors[name].stored_type

    def num_bytes(self, name: str) -> int:
        return self.tensors[name].num_bytes

    def format(self, name: str) -> WeightFormat | None:
        """The format of a quantised weight's codes; None if it is loaded as floats."""
        return self.tensors[name].format

    def array(self, name: str) -> AnyArray:
        """A tensor or weight that is stored as floats; a view if it is stored in order."""
        return np.asarray(self.tensors[name].load())

    @property
    def quantised(self) -> Mapping[str, StoredWeight]:
        """The weights that are stored in tensors of other names."""
        return {name: each for name, each in self.tensors.items() if isinstance(each, StoredWeight)}

    @property
    def has_codes(self) -> bool:
        """Whether weights are loaded as integer codes, for which activations are rounded."""
        formats = (each.format for each in self.tensors.values())
        return any(format is not None and format.is_quantised for format in formats)

    def watched(self, on_read: Callable[[str], object]) -> "Weights":
        """A copy that calls `on_read` with a name before the tensor or weight is read."""
        return replace(self, _on_read=on_read)

    def with_quantised(
        self, scheme: StoredScheme, quantised: Mapping[str, StoredWeight]
    ) -> "Weights":
        """A copy with quantised weights in place of the tensors that they are stored in."""
        return replace(self.with_stored(quantised), scheme=scheme)

    def with_stored(self, stored: Mapping[str, StoredWeight]) -> "Weights":
        """As `with_quantised`, whatever the format of the weights."""
        parts = {part.name for each in stored.values() for part in each.parts}
        others = {name: each for name, each in self.tensors.items() if name not in parts}
        return replace(self, tensors={**others, **stored})

    def with_parts(self, parts: Mapping[str, Mapping[str, Stored]]) -> "Weights":
        """A copy in which each tensor named in `parts` is replaced by those there, by their names.
        Raises CheckpointError if one of these is there already."""
        tensors = {name: each for name, each in self.tensors.items() if name not in parts}
        for stored, entries in parts.items():
            twice = next((name for name in entries if name in tensors), None)
            if twice is not None:
                raise CheckpointError(
                    f"the weights contain {twice[:120]} twice: as a separate tensor and in "
                    f"{stored[:120]}; remove one of the two"
                )
            tensors |= entries
        return replace(self, tensors=tensors)

    def renamed(self, own_name: Callable[[str], str | None]) -> "Weights":
        """A copy with other names, and without the tensors that have none."""
        own = {name: own_name(name) for name in self.tensors}
        return self.with_parts(
            {
                name: {} if other is None else {other: replace(self.entry(name), name=other)}
                for name, other in own.items()
                if other != name
            }
        )

    def digest(self) -> str:
        """A SHA-256 of all files' lengths and headers, in hex, whatever the files are called; no
        tensor is read."""
        state = hashlib.sha256()
        names = usual_names([file.name for file in self.files])
        for name, file in zip(names, self.files, strict=True):
            state.update(f"{name}\0{len(file.data)}\0{len(file.header)}\0".encode())
            state.update(file.header)
        return state.hexdigest()


def usual_names(names: Sequence[str]) -> Iterator[str]:
    """What files of weights are usually called, in place of their own names: these decide nothing,
    and digests are those of a folder whose shards have the usual ones."""
    num_shards = sum(name not in (SINGLE_FILE, MTP_FILE) for name in names)
    shards = (f"model-{n:05}-of-{num_shards:05}.safetensors" for n in range(1, num_shards + 1))
    return (name if name in (SINGLE_FILE, MTP_FILE) else next(shards) for name in names)


def open_weights(folder: Path, *, has_mtp_layers: bool = False) -> Weights:
    """Opens `model.safetensors`, or else the files listed in `model.safetensors.index.json`; with
    `has_mtp_layers` also `mtp.safetensors` beside the first of these, if there is one. Raises
    CheckpointError if there are none, or they are invalid."""
    if (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
        if has_mtp_layers and (folder / MTP_FILE).exists():
            names.append(MTP_FILE)
        return _joined([open_safetensors(folder / name) for name in names])
    if (folder / INDEX_FILE).exists():
        return _open_shards(folder)
    adapter = adapter_in(folder)
    if adapter is not None:  # beside its base's config.json
        raise CheckpointError(adapter)
    other = next((name for name in _OTHER_FORMATS if (folder / name).exists()), None)
    found = f"it has {other}, which is not supported; convert it" if other else "add one of them"
    raise CheckpointError(
        f"the folder {folder.name} has neither {SINGLE_FILE} nor {INDEX_FILE}; {found}"
    )


def _joined(opened: Sequence[tuple[MappedFile, dict[str, StoredTensor]]]) -> Weights:
    """Raises `CheckpointError` if a name is in two files."""
    tensors: dict[str, StoredTensor] = {}
    for _, of_file in opened:
        twice = next((name for name in of_file if name in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"tensor {shorten(twice)} is both in {SINGLE_FILE} and in {MTP_FILE}; remove one "
                f"of them"
            )
        tensors |= of_file
    return Weights(files=tuple(file for file, _ in opened), tensors=tensors)


def read_shard_names(folder: Path) -> list[str]:
    """Sorted. Raises `CheckpointError`."""
    return sorted(set(_read_index(folder).values()))


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    index = read_json_object(folder / INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    weight_map = index.child("weight_map")
    if weight_map is None:
        raise CheckpointError(f"{INDEX_FILE}: weight_map is missing; fetch the file again")
    shard_of = {name: _check_shard_name(weight_map, name) for name in weight_map.values}
    num_shards = len(set(shard_of.values()))
    if not 0 < num_shards <= MAX_SHARDS:
        raise CheckpointError(
            f"{INDEX_FILE} names {num_shards} files; supported are 1 to {MAX_SHARDS}"
        )
    return shard_of


def _open_shards(folder: Path) -> Weights:
    shard_of = _read_index(folder)
    opened = {name: open_safetensors(folder / name) for name in sorted(set(shard_of.values()))}
    _check_index(shard_of, {name: tensors for name, (_, tensors) in opened.items()})
    return _joined([*opened.values()])


def _check_shard_name(weight_map: JsonObject, tensor: str) -> str:
    """The shard of a tensor; refuses paths, which could lead out of the folder."""
    shard = weight_map.get(tensor)
    is_plain = (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and not shard.startswith(".")
        and not any(character in shard for character in "/\\:\0")
    )
    if not isinstance(shard, str) or not is_plain:
        raise CheckpointError(
            f"{weight_map.where}: the shard of tensor {shorten(tensor)} is {shorten(shard)}; it "
            f"must be the name of a .safetensors file in the same folder"
        )
    return shard


def _check_index(shard_of: dict[str, str], files: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    for name, shard in shard_of.items():
        if name not in files[shard]:
            raise CheckpointError(
                f"{shard} does not contain tensor {shorten(name)}, which {INDEX_FILE} lists for "
                f"it; fetch both files again"
            )
    for shard, tensors in files.items():
        for name in tensors:
            if shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{shard} contains tensor {shorten(name)}, which {INDEX_FILE} does not list "
                    f"for it; fetch both files again"
                )


NameRule = tuple[str, str | None]

LAYER, REST = "{layer}", "*"


def by_rules(rules: Iterable[NameRule]) -> Callable[[str], str | None]:
    """The declared name of a stored tensor, or None, for `Weights.renamed`."""
    compiled = [(*_compile(stored), own) for stored, own in rules]

    def own_name(name: str) -> str | None:
        for beginning, pattern, own in compiled:
            if name.startswith(beginning) and (found := pattern.fullmatch(name)) is not None:
                if own is None:
                    return None
                return own.removesuffix(REST).replace(LAYER, found["layer"]) + found["rest"]
        return name

    return own_name


def _compile(stored: str) -> tuple[str, re.Pattern[str]]:
    """The start of the names that a rule may fit, and their pattern."""
    before, _, after = stored.removesuffix(REST).partition(LAYER)
    layer = r"(?P<layer>\d{1,4})" if LAYER in stored else "(?P<layer>)"
    rest = "(?P<rest>.*)" if stored.endswith(REST) else "(?P<rest>)"
    pattern = f"{re.escape(before)}{layer}{re.escape(after)}{rest}"
    return before, re.compile(pattern, re.DOTALL)


def adapter_in(folder: Path) -> str | None:
    """The error text for a folder with a LoRA adapter; None for any other."""
    if not (folder / ADAPTER_FILE).is_file():
        return None
    try:
        base = read_json_object(folder / ADAPTER_FILE).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    return adapter_text(f"the folder {folder.name}", base)


def adapter_text(what: str, base: object) -> str:
    """The error for `what`, an adapter of the model `base`, if that is known."""
    of = f" of {shorten(base)}" if isinstance(base, str) and base else ""
    return f"{what} is a LoRA adapter{of}, which is no model by itself; {MERGE}"
