"""Untrusted JSON objects with checked getters, `JsonObject`, and the size limits of JSON files. A
getter returns a value of the requested type and range, or raises `CheckpointError`."""

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

from cadenza.errors import CheckpointError, show_size

MAX_JSON_BYTES = 4 << 20
MAX_POINTER_BYTES = 1024
POINTER_START = b"version https://git-lfs.github.com/spec/"

MAX_JSON_CONTAINERS = 2_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object; `where` names its origin in error messages. Null counts as absent."""

    values: Mapping[str, object]
    where: str

    def get(self, key: str) -> object:
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; required if `default` is None."""
        value = self.get(key)
        if value is None:
            return self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; required if `default` is None."""
        value = self.get(key)
        if value is None:
            return self._default(key, default)
        if not is_finite_number(value) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def child(self, key: str) -> "JsonObject | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(cast(dict[str, object], value), f"{self.where}: {key}")

    def items_of(self, key: str) -> list[object]:
        """The list under `key`; empty if absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return cast(list[object], value)

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        found = shorten(self.get(key))
        return CheckpointError(f"{self.where}: {key} is {found}; it must be {allowed}")

    def _default(self, key: str, default: T | None) -> T:
        if default is None:
            raise CheckpointError(f"{self.where}: {key} is missing; add it to the file")
        return default


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Reads a file of at most `max_bytes` that holds one JSON object. Raises CheckpointError if it
    is missing, not regular, too large, or not a JSON object."""
    return parse_json_object(read_small_file(path, max_bytes=max_bytes), path.name)


def read_small_file(path: Path, *, max_bytes: int) -> bytes:
    """Of a regular file. Raises `CheckpointError`."""
    num_bytes = regular_file_size(path)
    if num_bytes > max_bytes:
        raise CheckpointError(
            f"{path.name} has {show_size(num_bytes)}; at most {show_size(max_bytes)} are allowed; "
            f"check that it is the right file"
        )
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def regular_file_size(path: Path) -> int:
    """In bytes, of a regular file or a link to one. Raises `CheckpointError` for others, and for a
    pointer that Git LFS has in place of a file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file; replace it by one")
    if status.st_size <= MAX_POINTER_BYTES:
        _check_is_no_pointer(path)
    return status.st_size


def _check_is_no_pointer(path: Path) -> None:
    """Raises `CheckpointError` for a pointer of Git LFS (its `docs/spec.md`)."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_POINTER_BYTES)
    except OSError:
        return  # whoever reads the file says so
    if content.startswith(POINTER_START):
        size = re.search(rb"^size (\d{1,18})$", content, re.MULTILINE)
        of = "" if size is None else f" of {show_size(int(size[1]))}"
        raise CheckpointError(
            f"{path.name} is a Git LFS pointer in place of the file{of}: the repository was cloned "
            f"without Git LFS; run `git lfs install` and `git lfs pull` there, or download the file"
        )


def parse_json_object(data: bytes, where: str) -> JsonObject:
    """One JSON object without repeated keys. Raises `CheckpointError` for anything else."""
    if data.count(b"{") + data.count(b"[") > MAX_JSON_CONTAINERS:
        raise CheckpointError(f"{where} has over {MAX_JSON_CONTAINERS} lists and objects")
    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except _RepeatedKeyError as error:
        raise CheckpointError(f"{where}: the key {shorten(error.args[0])} occurs twice") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds {shorten(value)}; it must hold a JSON object")
    return JsonObject(cast(dict[str, object], value), where)


def is_finite_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def shorten(value: object, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters; large values are described, not formatted."""
    if isinstance(value, dict | list):
        size = len(cast(list[object], value))
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {size} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of over 256 bits"
    text = repr(value[: limit + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit + 2 else text[:limit] + "…"


class _RepeatedKeyError(ValueError):
    """A JSON object has the same key twice; parsers disagree about which value counts."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return result
