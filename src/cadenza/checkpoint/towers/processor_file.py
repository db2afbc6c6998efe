"""The settings of an image processor, `read_processor_settings`, and values that families share.
They are in processor_config.json as `image_processor`, or else in preprocessor_config.json."""

from pathlib import Path
from typing import cast

from cadenza.checkpoint.json_object import JsonObject, read_json_object
from cadenza.vision.patches import Normalisation
from cadenza.vision.pillow import FILTERS, Filter

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
