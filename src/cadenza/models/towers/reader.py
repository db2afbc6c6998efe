"""`TowerReader`: how the files of one family become a `VisionConfig`. An image processor's settings
lie in processor_config.json as `image_processor`, or else in preprocessor_config.json. To add a
family, write a module with its reader, and list it in `registry`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cadenza.config import DEFAULT_IMAGE_MAX_TOKENS
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, read_json_object, shorten
from cadenza.models.model_config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    ModelConfig,
)
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import CHANNELS, FILTERS, Filter
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    TowerActivation,
    TowerConfig,
    TowerNames,
    VisionConfig,
)
from cadenza.weights.weights import REST, NameRule


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
        return self.config.child("vision_config") or JsonObject({}, self.config.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerReader:
    """A family of models that see."""

    model_types: tuple[str, ...]  # of config.json
    names: tuple[NameRule, ...]  # of the tensors of tower and projectors, all of which are listed
    # the tower and its processor. Raises CheckpointError for what is not supported
    read: Callable[[VisionFiles], VisionConfig]

    def has(self, name: str) -> bool:
        return name.startswith(tuple(stored.partition(REST)[0] for stored, _ in self.names))


PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"

MAX_PIXELS_OF_SIDE = 1 << 14

# of OpenAI's CLIP
CLIP_NORMALISATION = Normalisation(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)

_STEPS = ("do_resize", "do_rescale", "do_convert_rgb")


def read_processor_settings(folder: Path) -> JsonObject | None:
    """None if a folder has neither file. Raises CheckpointError."""
    if (folder / PROCESSOR_FILE).is_file():
        nested = read_json_object(folder / PROCESSOR_FILE).child("image_processor")
        if nested is not None:
            return nested
    if (folder / IMAGE_PROCESSOR_FILE).is_file():
        return read_json_object(folder / IMAGE_PROCESSOR_FILE)
    return None


def check_steps(raw: JsonObject, *others: str) -> None:
    """Raises CheckpointError if one of the steps that all processors do, or another, is off."""
    for step in (*_STEPS, *others):
        if not raw.flag(step, True):
            raise raw.wrong(step, "true, or absent")


def read_filter(raw: JsonObject, default: Filter) -> Filter:
    """The filter of `resample`, one of Pillow's numbers."""
    return FILTERS[raw.integer("resample", 0, len(FILTERS) - 1, FILTERS.index(default))]


def read_normalisation(raw: JsonObject, default: Normalisation) -> Normalisation:
    """Of `rescale_factor`, `image_mean` and `image_std`, with these defaults."""
    return Normalisation(
        factor=raw.number("rescale_factor", 1e-6, 1.0, default.factor),
        mean=_channels(raw, "image_mean", -10.0, default.mean),
        std=_channels(raw, "image_std", 1e-6, default.std),
    )


def read_image_token(files: VisionFiles, default: int) -> int:
    """Of the text model's vocabulary. Raises CheckpointError."""
    token_id = files.config.integer("image_token_id", 0, MAX_VOCAB_SIZE, default)
    if token_id >= files.text.vocab_size:
        within = f"within the vocabulary of {files.text.vocab_size}"
        raise files.config.wrong("image_token_id", within)
    return token_id


def read_axial_theta(raw: JsonObject, default: float) -> float:
    rope = raw.child("rope_parameters") or JsonObject({}, raw.where)
    if rope.text("rope_type") not in (None, "axial", "default"):
        raise rope.wrong("rope_type", "axial, or absent")
    return rope.number("rope_theta", 1.0, 1e9, default)


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


MAX_PATCH = 128
MAX_IMAGE = 1 << 14

# by `hidden_act`
ACTIVATIONS: dict[str, TowerActivation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipDefaults:
    """What a file that leaves a setting out means."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    image_size: int = 224
    patch_size: int = 16


def read_siglip(
    raw: JsonObject, defaults: SiglipDefaults, projector: ProjectorConfig, names: TowerNames
) -> TowerConfig:
    """The tower of a `vision_config`. Raises CheckpointError."""
    width = raw.integer("hidden_size", 1, MAX_WIDTH, defaults.hidden_size)
    num_heads = raw.integer("num_attention_heads", 1, MAX_HEADS, defaults.num_heads)
    if width % num_heads:
        raise CheckpointError(
            f"{raw.where}: hidden_size {width} is not a multiple of num_attention_heads "
            f"{num_heads}; correct one of the two"
        )
    if raw.integer("num_channels", CHANNELS, CHANNELS, CHANNELS) != CHANNELS:
        raise raw.wrong("num_channels", str(CHANNELS))
    image = raw.integer("image_size", 1, MAX_IMAGE, defaults.image_size)
    patch = raw.integer("patch_size", 1, MAX_PATCH, defaults.patch_size)
    if image < patch * projector.side:
        raise raw.wrong("image_size", f"at least {patch * projector.side} pixels")
    return TowerConfig(
        hidden_size=width,
        intermediate_size=raw.integer(
            "intermediate_size", 1, MAX_WIDTH, defaults.intermediate_size
        ),
        num_layers=raw.integer("num_hidden_layers", 1, MAX_LAYERS, defaults.num_layers),
        num_heads=num_heads,
        head_dim=width // num_heads,
        patch_size=patch,
        patch_shape=(CHANNELS, patch, patch),
        norm_eps=raw.number("layer_norm_eps", 1e-12, 1.0, 1e-6),
        projector=projector,
        names=names,
        activation=read_tower_activation(raw, "hidden_act", "gelu_pytorch_tanh"),
        table=PatchTable(rule="raster", side=image // patch),
        has_post_norm=True,
    )


def read_tower_activation(raw: JsonObject, key: str, default: str) -> TowerActivation:
    name = raw.text(key) or default
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{raw.where}: {key} {shorten(name)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
