"""The metadata of one architecture, typed: `Settings`. A getter returns a value of the requested
type and range, or raises `CheckpointError` with the complete key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.model_config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH

MAX_FACTORS = 1 << 12


class Absent(Enum):
    """What the lack of a key means: the file is refused, or the family's value is taken."""

    REFUSED = auto()
    OF_FAMILY = auto()


OF_FAMILY = Absent.OF_FAMILY


@dataclass(frozen=True, slots=True)
class Row:
    """An entry of config.json, and the key of the metadata that has it: a whole number from `low`
    to `high`, another number if these are floats, or a flag without them."""

    entry: str
    key: str
    low: float | None = None
    high: float = 0
    default: float | Absent = Absent.REFUSED
    of_first_layer: bool = False  # of several values, one per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The metadata and tensors of a model's files; the first file has the metadata."""

    files: tuple[GGUFFile, ...]

    @property
    def metadata(self) -> JsonObject:
        return self.files[0].header.metadata

    @property
    def architecture(self) -> str:
        name = self.metadata.text("general.architecture")
        if name is None:
            raise CheckpointError(
                f"{self.metadata.where}: general.architecture is missing; convert the model again"
            )
        return name

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        return {name: each for file in self.files for name, each in file.header.tensors.items()}

    @property
    def num_layers(self) -> int:
        """Without the MTP layers after the model's own."""
        count = self.integer("block_count", 1, MAX_LAYERS)
        return count - self.integer("nextn_predict_layers", 0, count - 1, 0)

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count", 1, MAX_HEADS)

    @property
    def head_dim(self) -> int:
        per_head = self.integer("embedding_length", 1, MAX_WIDTH) // self.num_heads
        return self.integer("attention.key_length", 2, MAX_HEAD_DIM, per_head)

    def is_in_layers(self, name: str) -> bool:
        return any(key.startswith("blk.") and key.endswith(f".{name}") for key in self.tensors)

    def keys(self) -> set[str]:
        """The architecture's own keys, without its prefix."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self.metadata.values if key.startswith(prefix)}

    def has(self, key: str) -> bool:
        return self.metadata.has(self._full(key))

    def require(self, *keys: str) -> None:
        """Raises CheckpointError for a key that the file lacks."""
        for key in keys:
            if not self.has(key):
                full = self._full(key)
                raise CheckpointError(
                    f"{self.metadata.where}: {full} is missing; add it to the file"
                )

    def entries(self, rows: Iterable[Row]) -> dict[str, object]:
        """The entries of config.json that rows say, without those that are left to the family."""
        found: dict[str, object] = {}
        for row in rows:
            if not self.has(row.key) and not isinstance(row.default, Absent):
                found[row.entry] = row.default
                continue
            if row.default is Absent.REFUSED:
                self.require(row.key)
            if not self.has(row.key):
                continue
            if row.low is None:
                found[row.entry] = self.flag(row.key, False)
            elif row.of_first_layer:
                bounds = int(row.low), int(row.high)
                found[row.entry] = self.integer_of_layer(row.key, 0, bounds)
            elif isinstance(row.low, int):
                found[row.entry] = self.integer(row.key, row.low, int(row.high))
            else:
                found[row.entry] = self.number(row.key, row.low, row.high)
        return found

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer, or an array with a value per layer if all are the same."""
        return self._of_layers(key).integer(self._full(key), low, high, default)

    def integer_of_layer(
        self, key: str, layer: int, bounds: tuple[int, int], default: int | None = None
    ) -> int:
        """Of an array with one per layer or of one for all."""
        full = self._full(key)
        value = self.metadata.get(full)
        if not isinstance(value, np.ndarray):
            return self.metadata.integer(full, *bounds, default)
        values = cast(npt.NDArray[Any], value)
        if values.dtype.kind not in "iu" or not 0 <= layer < len(values):
            raise self.wrong(key, "an array with a number per layer")
        return JsonObject({full: int(values[layer])}, self.metadata.where).integer(full, *bounds)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return self.metadata.number(self._full(key), low, high, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.metadata.flag(self._full(key), default)

    def text(self, key: str) -> str | None:
        return self.metadata.text(self._full(key))

    def flags_of_layers(self, key: str, num_layers: int) -> list[bool]:
        value = self.metadata.get(self._full(key))
        if not isinstance(value, np.ndarray) or len(cast(Any, value)) != num_layers:
            raise self.wrong(key, f"an array of {num_layers} flags, one per layer")
        return [bool(each) for each in cast(npt.NDArray[Any], value)]

    def integers_of_layers(self, key: str, num_layers: int | None = None) -> list[int] | None:
        """An array with an integer per layer, or so many; None if the key has one value for all."""
        if not self.is_array(key):
            return None
        num_layers = num_layers or self.integer("block_count", 1, MAX_LAYERS)
        values = cast(npt.NDArray[Any], self.metadata.get(self._full(key)))
        if len(values) != num_layers or values.dtype.kind not in "iu":
            raise self.wrong(key, f"an array of {num_layers} integers, one per layer")
        return [int(each) for each in values]

    def is_array(self, key: str) -> bool:
        return isinstance(self.metadata.get(self._full(key)), np.ndarray)

    def factors(self, tensor: str, count: int) -> tuple[float, ...] | None:
        """The values of a tensor [count] of float32; None if there is no such tensor."""
        for file in self.files:
            entry = file.header.tensors.get(tensor)
            if entry is None:
                continue
            if entry.type.name != "F32" or entry.shape != (count,) or count > MAX_FACTORS:
                raise CheckpointError(
                    f"{file.mapped.name}: tensor {tensor} is {entry.type.name} of shape "
                    f"{list(entry.shape)}; it must be F32 of shape [{count}]"
                )
            return tuple(np.frombuffer(file.mapped.data, "<f4", count, entry.start).tolist())
        return None

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        return self.metadata.wrong(self._full(key), allowed)

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _of_layers(self, key: str) -> JsonObject:
        """The metadata, with the array of `key` replaced by the value that all layers share."""
        full = self._full(key)
        value = self.metadata.get(full)
        if not isinstance(value, np.ndarray):
            return self.metadata
        values = np.unique(cast(npt.NDArray[Any], value))
        if len(values) != 1 or values.dtype.kind not in "iu":
            raise CheckpointError(
                f"{self.metadata.where}: {full} has the values {shorten(str(values[:8].tolist()))};"
                f" supported are models whose layers all have the same"
            )
        return JsonObject({full: int(values[0])}, self.metadata.where)
