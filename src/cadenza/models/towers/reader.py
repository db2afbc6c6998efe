"""`TowerReader`: how the files of one family become a `VisionConfig`; the settings of an image
processor, which lie in processor_config.json as `image_processor`, or else in
preprocessor_config.json. To add a family, write a module with its reader, and list it in
`registry`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cadenza.config import DEFAULT_IMAGE_MAX_TOKENS
from cadenza.json_object import JsonObject, read_json_object
from cadenza.models.model_config import ModelConfig
from cadenza.models.name_rules import REST, NameRule
from cadenza.vision.patches import Normalisation
from cadenza.vision.pillow import FILTERS, Filter
from cadenza.vision.tower_config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """What is asked for of a model's images."""

    has_images: bool = True  # False: the text model alone is opened
    # a GGUF file with the tower; None: the one beside the model, if there is one
    projector: Path | None = None
    # of an image whose size is its own; larger ones are reduced
    max_tokens: int = DEFAULT_IMAGE_MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """What a family reads."""

    config: JsonObject  # config.json, of the whole model
    processor: JsonObject  # the settings of its image processor
    text: ModelConfig  # the text model
    max_tokens: int  # as `VisionOptions.max_tokens`

    @property
    def tower(self) -> JsonObject:
        """The settings in `vision_config`; empty if it is absent."""
        return self.config.child("vision_config") or JsonObject({}, self.config.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerReader:
    """A family of models that see."""

    model_types: tuple[str, ...]  # of config.json
    names: tuple[NameRule, ...]  # of the tensors of tower and projectors, all of which are listed
    # the tower and its processor. Raises CheckpointError for what is not supported
    read: Callable[[VisionFiles], VisionConfig]

    def has(self, name: str) -> bool:
        """Whether a tensor of this name belongs to a tower or projector."""
        return name.startswith(tuple(stored.partition(REST)[0] for stored, _ in self.names))


PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"

MAX_PIXELS_OF_SIDE = 1 << 14

_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def read_processor_settings(folder: Path) -> JsonObject | None:
    """None if a folder has neither file. Raises CheckpointError."""
    if (folder / PROCESSOR_FILE).is_file():
        nested = read_json_object(folder / PROCESSOR_FILE).child("image_processor")
        if nested is not None:
            return nested
    if (folder / IMAGE_PROCESSOR_FILE).is_file():
        return read_json_object(folder / IMAGE_PROCESSOR_FILE)
    return None


def check_steps(raw: JsonObject, others: tuple[str, ...] = ()) -> None:
    """Raises CheckpointError if one of the steps that all processors do is off."""
    for step in (*_STEPS, *others):
        if not raw.flag(step, True):
            raise raw.wrong(step, "true, or absent")


def read_filter(raw: JsonObject, default: Filter) -> Filter:
    """The filter of `resample`, one of Pillow's numbers."""
    return FILTERS[raw.integer("resample", 0, len(FILTERS) - 1, FILTERS.index(default))]


def read_normalisation(
    raw: JsonObject, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> Normalisation:
    """Of `rescale_factor`, `image_mean` and `image_std`, with these defaults."""
    return Normalisation(
        factor=raw.number("rescale_factor", 1e-6, 1.0, 1.0 / 255.0),
        mean=_channels(raw, "image_mean", -10.0, mean),
        std=_channels(raw, "image_std", 1e-6, std),
    )


def _channels(
    raw: JsonObject, key: str, low: float, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = raw.get(key)
    if value is None:
        return default
    items = cast(list[object], value) if isinstance(value, list) else [value] * 3
    if len(items) != 3:
        raise raw.wrong(key, "a number, or a list of three")
    found = [JsonObject({key: item}, raw.where).number(key, low, 10.0) for item in items]
    return found[0], found[1], found[2]
