"""Models of an unknown type that a file beside them, `cadenza.toml`, describes by a known family
and what has other names or values (the format: docs/models.md). Everything else is as strict as for
a known type: a setting that changes the arithmetic and is not described is refused by name, and so
is a tensor that is missing or left over."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, read_small_file, shorten
from cadenza.models.config_json import parse_model_config
from cadenza.models.families import FAMILIES
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weights import LAYER, REST, NameRule

DESCRIPTION_FILE = "cadenza.toml"
MAX_DESCRIPTION_BYTES = 1 << 20

# settings of config.json that the description replaces
_REPLACED = frozenset({"model_type", "architectures", "auto_map"})

_NORM_FIELDS = {
    "qk": "qk_norm",
    "before": "has_pre_norms",
    "after": "has_post_norms",
    "adds_one": "norm_adds_one",
}
_FLAGS = {True: True, False: False}
_QK_NORMS = {"none": None, "head": "head", "all_heads": "all_heads"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The content of a `cadenza.toml`."""

    like: str  # the `model_type` of the family
    # the family's keys, and those of config.json
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    # settings by the family's keys
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    norms: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `ModelConfig`
    # the family's names, and the stored ones
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: tuple[str, ...] = ()  # beginnings of names
    content: bytes = b""  # the file's bytes

    def read_config(self, raw: JsonObject) -> ModelConfig:
        """The config of the model whose config.json is `raw`. Raises CheckpointError."""
        missing = next((key for key in self.settings.values() if key not in raw.values), None)
        if missing is not None:
            raise CheckpointError(
                f"{DESCRIPTION_FILE}: settings names {missing[:80]}, which {raw.where} does not "
                f"have; correct one of the two"
            )
        taken = {*self.settings.values(), *_REPLACED}
        values = {key: value for key, value in raw.values.items() if key not in taken}
        values |= {own: raw.values[key] for own, key in self.settings.items()}
        values |= {**self.values, "model_type": self.like}
        return replace(parse_model_config(values, raw.where), **self.norms)

    @property
    def names(self) -> Sequence[NameRule]:
        """From the stored names to the family's."""
        ignored: list[NameRule] = [(f"{name}{REST}", None) for name in self.ignored]
        return [*ignored, *((stored, own) for own, stored in self.tensors.items())]


def read_description(folder: Path) -> Description | None:
    """The description of a folder's model; None without one. Raises CheckpointError if the file is
    too large, no TOML, or not in the documented format."""
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        return None
    content = read_small_file(path, max_bytes=MAX_DESCRIPTION_BYTES)
    try:
        raw = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CheckpointError(f"{DESCRIPTION_FILE} is no TOML: {error}") from error
    return replace(_parse(raw), content=content)


def _parse(raw: dict[str, Any]) -> Description:
    tables = ("settings", "values", "norms", "tensors", "ignored")
    unknown = next((key for key in raw if key not in ("like", *tables)), None)
    if unknown is not None:
        raise _wrong(unknown, f"not known; known are like and the tables {', '.join(tables)}")
    like = raw.get("like")
    if like not in FAMILIES:
        raise _wrong("like", f"{shorten(like)}; it must be one of {', '.join(FAMILIES)}")
    for name in tables:
        if not isinstance(raw.get(name, {}), dict):
            raise _wrong(name, "no table")
    return Description(
        like=like,
        settings=_texts("settings", raw.get("settings", {})),
        values=raw.get("values", {}),
        norms=_norms(raw.get("norms", {})),
        tensors=_texts("tensors", raw.get("tensors", {})),
        ignored=_names(raw.get("ignored", {})),
    )


def _texts(name: str, table: dict[str, Any]) -> dict[str, str]:
    for key, value in table.items():
        if not isinstance(value, str):
            raise _wrong(f"{name}.{key}", f"{shorten(value)}; it must be a name")
        if name == "tensors" and (key.count(LAYER), value.count(LAYER)) not in ((0, 0), (1, 1)):
            raise _wrong(f"{name}.{key}", f"{shorten(value)}; both need {LAYER} once, or none")
    return table


def _norms(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _NORM_FIELDS:
            raise _wrong(f"norms.{key}", f"not known; known are {', '.join(_NORM_FIELDS)}")
        allowed = cast(Mapping[Any, Any], _QK_NORMS if key == "qk" else _FLAGS)
        if not isinstance(value, str | bool) or value not in allowed:
            names = [str(each).lower() for each in allowed]
            raise _wrong(f"norms.{key}", f"{shorten(value)}; it must be {', '.join(names)}")
        found[_NORM_FIELDS[key]] = allowed[value]
    return found


def _names(table: dict[str, Any]) -> tuple[str, ...]:
    names = table.get("names", [])
    if set(table) - {"names"} or not isinstance(names, list):
        raise _wrong("ignored", "not a list of names; give names = [...]")
    every = cast(list[Any], names)
    odd = [each for each in every if not isinstance(each, str) or not each]
    if odd:
        raise _wrong("ignored.names", f"{shorten(odd[0])}; it must have names")
    return tuple(every)


def _wrong(key: str, what: str) -> CheckpointError:
    return CheckpointError(f"{DESCRIPTION_FILE}: {key} is {what}")
