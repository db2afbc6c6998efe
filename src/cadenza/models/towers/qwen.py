"""Qwen3-VL and Qwen3.5 with their mixtures, Qwen2.5-VL, Qwen2-VL (transformers, models/qwen3_vl,
qwen3_5, qwen2_5_vl, qwen2_vl): images of any size, rotary positions of two axes, 2 x 2 patches
joined into a token, two linears with an exact GELU. Qwen3-VL and 3.5 also have a table of
positions; Qwen3-VL adds outputs of some layers to the text model's first ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.model_config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from cadenza.models.towers.reader import (
    CLIP_NORMALISATION,
    MAX_PATCH,
    TowerReader,
    VisionFiles,
    check_steps,
    read_filter,
    read_image_token,
    read_normalisation,
    read_tower_activation,
)
from cadenza.vision.processor import CHANNELS
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    ProjectorLinear,
    TowerConfig,
    TowerNames,
    TowerNorm,
    TowerRope,
    TowerWindows,
    VisionConfig,
)
from cadenza.vision.whole_images import QwenImages

PREFIX = "model.visual."
NORM_EPS = 1e-6
ROPE = TowerRope(theta=10_000.0)

MAX_PIXELS = 1 << 26
MAX_MERGE = 8
MAX_POSITIONS = 1 << 20

_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
_PATCH = 14  # defaults of transformers' processor

NAMES = TowerNames(
    patch=f"{PREFIX}patch_embed.proj",
    positions=f"{PREFIX}pos_embed.weight",
    layers=f"{PREFIX}blocks",
    norm1="norm1",
    norm2="norm2",
    qkv="attn.qkv",
    out="attn.proj",
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    read: Callable[[JsonObject, int], TowerConfig]
    image_token_id: int = 151_655


def _read(files: VisionFiles) -> VisionConfig:
    raw = files.config
    name = raw.text("model_type") or ""
    generation = _GENERATIONS[name]
    if not files.text.rope.axes:
        raise CheckpointError(
            f"{raw.where}: the rope of the text model has no mrope_section, by which the tokens of "
            f"images are placed; fetch the checkpoint again"
        )
    tower = generation.read(files.tower, files.text.hidden_size)
    if tower.num_deepstack >= files.text.num_layers:
        raise files.tower.wrong(
            "deepstack_visual_indexes",
            f"a list of fewer layers than the text model's {files.text.num_layers}",
        )
    processor = read_qwen_images(files.processor, files.max_tokens)
    frames = tower.patch_shape[1]
    found = processor.patch_size, processor.merge_size, processor.temporal_size
    if found != (tower.patch_size, tower.merge, frames):
        raise CheckpointError(
            f"{files.processor.where}: patch_size, merge_size and temporal_patch_size are "
            f"{', '.join(map(str, found))}, but the tower's are {tower.patch_size}, {tower.merge}, "
            f"{frames}; correct one of them"
        )
    token_id = read_image_token(files, generation.image_token_id)
    return VisionConfig(
        family=name,
        tower=tower,
        processor=processor,
        image_token_id=token_id,
        fill_token_id=token_id,
        max_part_tokens=processor.most_tokens,
    )


def read_qwen_images(raw: JsonObject, max_tokens: int) -> QwenImages:
    """The processor, whose bounds of pixels have two names. Raises CheckpointError."""
    check_steps(raw, "do_normalize")
    size = raw.child("size") or JsonObject({}, raw.where)

    def pixels(old: str, new: str, default: int) -> int:
        inner = size.integer(old, 1, MAX_PIXELS, default) if size.has(old) else default
        inner = size.integer(new, 1, MAX_PIXELS, inner)
        return raw.integer(old, 1, MAX_PIXELS, inner)

    return QwenImages(
        patch_size=raw.integer("patch_size", 1, MAX_PATCH, _PATCH),
        merge_size=raw.integer("merge_size", 1, MAX_MERGE, 2),
        temporal_size=raw.integer("temporal_patch_size", 1, MAX_MERGE, 2),
        min_pixels=pixels("min_pixels", "shortest_edge", _LEAST),
        max_pixels=pixels("max_pixels", "longest_edge", _MOST),
        resample=read_filter(raw, "bicubic"),
        normalisation=read_normalisation(raw, CLIP_NORMALISATION),
        max_tokens=max_tokens,
    )


def _read_common(raw: JsonObject, width_key: str, width: int) -> TowerConfig:
    """What all generations share; the projector is that of `_projector`."""
    if raw.integer("in_channels", 1, MAX_PATCH, raw.integer("in_chans", 1, MAX_PATCH, 3)) != 3:
        raise raw.wrong("in_channels", str(CHANNELS))
    hidden = raw.integer(width_key, 1, MAX_WIDTH)
    num_heads = raw.integer("num_heads", 1, MAX_HEADS, 16)
    if hidden % (4 * num_heads):
        raise raw.wrong("num_heads", f"a number of heads of which {width_key} {hidden} has four")
    patch = raw.integer("patch_size", 1, MAX_PATCH, _PATCH)
    frames = raw.integer("temporal_patch_size", 1, MAX_MERGE, 2)
    side = raw.integer("spatial_merge_size", 1, MAX_MERGE, 2)
    return TowerConfig(
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size", 1, MAX_WIDTH, 4 * hidden),
        num_layers=raw.integer("depth", 1, MAX_LAYERS),
        num_heads=num_heads,
        head_dim=hidden // num_heads,
        patch_size=patch,
        patch_shape=(CHANNELS, frames, patch, patch),
        norm_eps=NORM_EPS,
        projector=_projector(
            side, hidden, width, ("merger.norm", "merger.linear_fc1", "merger.linear_fc2")
        ),
        names=NAMES,
        activation=read_tower_activation(raw, "hidden_act", "gelu_pytorch_tanh"),
        rope=ROPE,
    )


def _projector(
    side: int, hidden: int, width: int, names: tuple[str, str, str], *, norm: TowerNorm = "layer"
) -> ProjectorConfig:
    """Norm, join, linear, exact GELU, linear."""
    joined = hidden * side**2
    of_norm, first, second = (f"{PREFIX}{name}" for name in names)
    return ProjectorConfig(
        side=side,
        linears=(
            ProjectorLinear(name=first, num_out=joined, activation="gelu"),
            ProjectorLinear(name=second, num_out=width),
        ),
        norm=norm,
        norm_name=of_norm,
        norm_eps=NORM_EPS,
    )


def _read_qwen3(raw: JsonObject, width: int) -> TowerConfig:
    tower = _read_common(raw, "hidden_size", width)
    _check_width(raw, "out_hidden_size", width)
    positions = raw.integer("num_position_embeddings", 1, MAX_POSITIONS, 2304)
    side = math.isqrt(positions)
    if side * side != positions:
        raise raw.wrong("num_position_embeddings", "the square of a number")
    return replace(tower, table=PatchTable(rule="bilinear", side=side))


def _read_qwen3_vl(raw: JsonObject, width: int) -> TowerConfig:
    tower = _read_qwen3(raw, width)
    layers = _layers_of(raw, "deepstack_visual_indexes", tower.num_layers)
    stem = "deepstack_merger_list.{index}"
    names = f"{stem}.norm", f"{stem}.linear_fc1", f"{stem}.linear_fc2"
    projector = replace(
        _projector(tower.merge, tower.hidden_size, width, names), norm_is_behind=True
    )
    return replace(tower, deepstack_layers=layers, deepstack=projector if layers else None)


def _read_qwen25_vl(raw: JsonObject, width: int) -> TowerConfig:
    tower = _read_common(raw, "hidden_size", width)
    _check_width(raw, "out_hidden_size", width)
    unit = tower.patch_size * tower.merge
    window = raw.integer("window_size", unit, MAX_PIXELS, 112)
    if tower.activation not in ("silu", "gelu", "gelu_tanh"):
        raise raw.wrong("hidden_act", "silu")
    return replace(
        _older(tower, width, norm="rms"),
        is_gated=True,
        windows=TowerWindows(
            side=window // unit,
            full_layers=_layers_of(raw, "fullatt_block_indexes", tower.num_layers),
        ),
        names=replace(NAMES, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
    )


def _read_qwen2_vl(raw: JsonObject, width: int) -> TowerConfig:
    _check_width(raw, "hidden_size", width)
    tower = _read_common(raw, "embed_dim", width)
    ratio = raw.integer("mlp_ratio", 1, 64, 4)
    return replace(
        _older(tower, width, norm="layer"),
        activation=read_tower_activation(raw, "hidden_act", "quick_gelu"),
        intermediate_size=ratio * tower.hidden_size,
        names=replace(NAMES, up="mlp.fc1", down="mlp.fc2"),
    )


def _older(tower: TowerConfig, width: int, *, norm: TowerNorm) -> TowerConfig:
    """What Qwen2.5-VL (RMS norms, gated MLPs, windows) and Qwen2-VL (LayerNorms, quick GELU)
    share."""
    names = "merger.ln_q", "merger.mlp.0", "merger.mlp.2"
    return replace(
        tower,
        norm=norm,
        projector=_projector(tower.merge, tower.hidden_size, width, names, norm=norm),
        has_patch_bias=False,
    )


def _check_width(raw: JsonObject, key: str, width: int) -> None:
    if raw.integer(key, 1, MAX_WIDTH, width) != width:
        raise raw.wrong(key, f"{width}, the text model's hidden_size")


def _layers_of(raw: JsonObject, key: str, num_layers: int) -> tuple[int, ...]:
    found: list[int] = []
    for value in raw.items_of(key):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_layers:
            raise raw.wrong(key, f"a list of layers from 0 to {num_layers - 1}")
        found.append(value)
    if found != sorted(set(found)):
        raise raw.wrong(key, "ascending")
    return tuple(found)


_GENERATIONS = {
    "qwen3_vl": _Generation(read=_read_qwen3_vl),
    "qwen3_vl_moe": _Generation(read=_read_qwen3_vl),
    "qwen3_5": _Generation(read=_read_qwen3, image_token_id=248_056),
    "qwen3_5_moe": _Generation(read=_read_qwen3, image_token_id=248_056),
    "qwen2_5_vl": _Generation(read=_read_qwen25_vl),
    "qwen2_vl": _Generation(read=_read_qwen2_vl),
}

QWEN = TowerReader(
    model_types=tuple(_GENERATIONS),
    names=((f"{PREFIX}*", f"{PREFIX}*"), ("visual.*", f"{PREFIX}*")),
    read=_read,
)
