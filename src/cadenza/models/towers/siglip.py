"""Settings of SigLIP towers, which several families have: `read_siglip`."""

from dataclasses import dataclass

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.model_config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from cadenza.vision.processor import CHANNELS
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    TowerActivation,
    TowerConfig,
    TowerNames,
)

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
    """An activation by its name."""
    name = raw.text(key) or default
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{raw.where}: {key} {shorten(name)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
