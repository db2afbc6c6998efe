"""Mistral 3 (with Ministral 3): a Pixtral tower, blocks of patches joined, three products. Source:
transformers, models/pixtral and models/mistral3."""

import math

from cadenza.models.model_config import MAX_HEADS, MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH
from cadenza.models.towers.reader import (
    CLIP_NORMALISATION,
    MAX_PATCH,
    MAX_PIXELS_OF_SIDE,
    TowerReader,
    VisionFiles,
    check_steps,
    read_axial_theta,
    read_filter,
    read_normalisation,
    read_tower_activation,
)
from cadenza.vision.processor import CHANNELS
from cadenza.vision.tower_config import (
    ProjectorConfig,
    ProjectorLinear,
    TowerConfig,
    TowerNames,
    TowerRope,
    VisionConfig,
)
from cadenza.vision.whole_images import PixtralImages

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
NAMES = TowerNames(
    patch=f"{TOWER}.patch_conv",
    pre_norm=f"{TOWER}.ln_pre",
    layers=f"{TOWER}.transformer.layers",
    norm1="attention_norm",
    norm2="ffn_norm",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    out="attention.o_proj",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)

_IMAGE_TOKEN = 10
_NORM_EPS = 1e-5  # of the tower's norms, whatever the file says

_LONGEST_EDGE = 1024


def _read(files: VisionFiles) -> VisionConfig:
    raw, tower = files.config, files.tower
    side = raw.integer("spatial_merge_size", 1, 32, 2)
    if raw.get("vision_feature_layer") not in (None, -1):
        raise raw.wrong("vision_feature_layer", "-1, or absent: the last layer's output")
    width = tower.integer("hidden_size", 1, MAX_WIDTH, 1024)
    num_heads = tower.integer("num_attention_heads", 1, MAX_HEADS, 16)
    if width % num_heads or width // num_heads % 4:
        raise tower.wrong("hidden_size", f"a multiple of 4 heads of {num_heads}")
    head_dim = width // num_heads
    if tower.integer("head_dim", 1, MAX_WIDTH, head_dim) != head_dim:
        raise tower.wrong("head_dim", f"hidden_size / num_attention_heads, which is {head_dim}")
    patch = tower.integer("patch_size", 1, MAX_PATCH, 14)
    processor = _read_processor(files, patch, side)
    theta = tower.number("rope_theta", 1.0, 1e9, 10_000.0)
    longest = math.ceil(processor.longest_edge / processor.unit)
    return VisionConfig(
        family="mistral3",
        tower=TowerConfig(
            hidden_size=width,
            intermediate_size=tower.integer("intermediate_size", 1, MAX_WIDTH, 4096),
            num_layers=tower.integer("num_hidden_layers", 1, MAX_LAYERS, 24),
            num_heads=num_heads,
            head_dim=head_dim,
            patch_size=patch,
            patch_shape=(CHANNELS, patch, patch),
            norm_eps=_NORM_EPS,
            projector=_projector(files, side, width),
            names=NAMES,
            norm="rms",
            activation=read_tower_activation(tower, "hidden_act", "gelu"),
            rope=TowerRope(theta=read_axial_theta(tower, theta), alternates=True),
            has_patch_bias=False,
            has_attention_bias=False,
            has_mlp_bias=False,
            has_pre_norm=True,
            is_gated=True,
        ),
        processor=processor,
        image_token_id=raw.integer("image_token_index", 0, MAX_VOCAB_SIZE, _IMAGE_TOKEN),
        fill_token_id=0,
        max_part_tokens=min(processor.max_tokens, longest * longest),
    )


def _projector(files: VisionFiles, side: int, width: int) -> ProjectorConfig:
    raw, num_out = files.config, files.text.hidden_size
    activation = read_tower_activation(raw, "projector_hidden_act", "gelu")
    has_bias = raw.flag("multimodal_projector_bias", False)
    return ProjectorConfig(
        side=side,
        linears=(
            ProjectorLinear(
                name=f"{PROJECTOR}.patch_merger.merging_layer", num_out=width, has_bias=False
            ),
            ProjectorLinear(
                name=f"{PROJECTOR}.linear_1",
                num_out=num_out,
                has_bias=has_bias,
                activation=activation,
            ),
            ProjectorLinear(name=f"{PROJECTOR}.linear_2", num_out=num_out, has_bias=has_bias),
        ),
        norm="rms",
        norm_name=f"{PROJECTOR}.norm",
        norm_eps=files.text.rms_norm_eps,
        joins_channels_first=True,
    )


def _read_processor(files: VisionFiles, patch: int, side: int) -> PixtralImages:
    raw = files.processor
    check_steps(raw, "do_normalize")
    own = raw.get("patch_size")
    sizes = raw.child("patch_size") if isinstance(own, dict) else None
    keys = ("height", "width")
    found = (
        {raw.integer("patch_size", 1, MAX_PATCH * 32, patch)}
        if sizes is None
        else {sizes.integer(key, 1, MAX_PATCH * 32, patch) for key in keys}
    )
    if not found <= {patch, patch * side}:
        raise raw.wrong("patch_size", f"that of the tower, which is {patch}")
    size = raw.child("size")
    longest = _LONGEST_EDGE
    if size is not None:
        longest = size.integer("longest_edge", 1, MAX_PIXELS_OF_SIDE)
    return PixtralImages(
        longest_edge=longest,
        patch_size=patch,
        merge_size=side,
        resample=read_filter(raw, "bicubic"),
        normalisation=read_normalisation(raw, CLIP_NORMALISATION),
        max_tokens=files.max_tokens,
    )


MISTRAL3 = TowerReader(
    model_types=("mistral3",),
    names=tuple(
        (f"{newer}{part}.*", f"{part}.*") for newer in ("", "model.") for part in (TOWER, PROJECTOR)
    ),
    read=_read,
)
