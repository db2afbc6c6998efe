"""Gemma 3: a SigLIP tower, blocks of patches averaged, a norm and one product. Source:
transformers, models/gemma3."""

import math
from collections.abc import Iterator
from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.model_config import MAX_VOCAB_SIZE
from cadenza.models.name_rules import NameRule
from cadenza.models.towers.reader import (
    MAX_PIXELS_OF_SIDE,
    TowerReader,
    VisionFiles,
    check_steps,
    read_filter,
    read_normalisation,
)
from cadenza.models.towers.siglip import SiglipDefaults, read_siglip
from cadenza.vision.gemma_images import Gemma3Images
from cadenza.vision.tower_config import (
    ProjectorConfig,
    ProjectorLinear,
    TowerConfig,
    TowerNames,
    VisionConfig,
)

NAMES = TowerNames()
PROJECTOR = "multi_modal_projector"
PROJECTION, NORM = f"{PROJECTOR}.mm_input_projection", f"{PROJECTOR}.mm_soft_emb_norm"

_TOWER = "vision_tower"
_SIZE = ("height", "width")
_IMAGE_TOKEN = 262_144
_TOKENS = 256
_HALF = (0.5, 0.5, 0.5)


def _read(files: VisionFiles) -> VisionConfig:
    raw = files.config
    num_tokens = raw.integer("mm_tokens_per_image", 1, 1 << 16, _TOKENS)
    tower = read_siglip(files.tower, SiglipDefaults(), _projector(files), NAMES)
    assert tower.table is not None, "a SigLIP tower has a table"
    patches, side = tower.table.side, math.isqrt(num_tokens)
    if side * side != num_tokens or patches % side:
        raise raw.wrong(
            "mm_tokens_per_image", f"the square of a divisor of {patches} patches a side"
        )
    if files.max_tokens < num_tokens:
        raise CheckpointError(
            f"--image-max-tokens {files.max_tokens} is below {num_tokens}, which Gemma 3 makes of "
            f"every image; set {num_tokens} or more, or --no-images"
        )
    tower = replace(tower, projector=replace(tower.projector, side=patches // side))
    token_id = raw.integer("image_token_index", 0, MAX_VOCAB_SIZE, _IMAGE_TOKEN)
    return VisionConfig(
        family="gemma3",
        tower=tower,
        processor=_read_processor(files.processor, tower, patches),
        image_token_id=token_id,
        fill_token_id=token_id if token_id < files.text.vocab_size else 0,
        max_part_tokens=num_tokens,
        reach="all",
    )


def _projector(files: VisionFiles) -> ProjectorConfig:
    """For one patch a token, until both are known."""
    linear = ProjectorLinear(name=PROJECTION, num_out=files.text.hidden_size, has_bias=False)
    return ProjectorConfig(
        side=1,
        linears=(linear,),
        reduction="average",
        norm="rms",
        norm_name=NORM,
        norm_eps=files.tower.number("layer_norm_eps", 1e-12, 1.0, 1e-6),
        norm_adds_one=True,
        norm_is_behind=True,
        is_transposed=True,
    )


def _read_processor(raw: JsonObject, tower: TowerConfig, patches: int) -> Gemma3Images:
    check_steps(raw)
    if raw.flag("do_pan_and_scan", False):
        raise raw.wrong("do_pan_and_scan", "false, null or absent")
    size, side = raw.child("size"), patches * tower.patch_size
    sides = [
        side if size is None else size.integer(key, 1, MAX_PIXELS_OF_SIDE, side) for key in _SIZE
    ]
    if sides != [side, side]:
        raise CheckpointError(
            f"{raw.where}: size is {sides[0]} x {sides[1]} pixels, and the tower takes images of "
            f"{side} x {side}; use the processor's file of the same checkpoint"
        )
    return Gemma3Images(
        side=side,
        patch_size=tower.patch_size,
        merge_size=tower.merge,
        resample=read_filter(raw, "bilinear"),
        normalisation=read_normalisation(raw, _HALF, _HALF),
    )


def _names(newer: str) -> Iterator[NameRule]:
    """Newer files have `model.` before these names, or no `vision_model` in them; the product is no
    linear's there. The tower's own head is not opened."""
    tower = f"{newer}{_TOWER}"
    yield f"{newer}{PROJECTION}_weight", f"{PROJECTION}.weight"
    yield f"{newer}{PROJECTOR}.*", f"{PROJECTOR}.*"
    yield f"{tower}.vision_model.head.*", None
    yield f"{tower}.head.*", None
    yield f"{tower}.vision_model.*", f"{_TOWER}.vision_model.*"
    yield f"{tower}.*", f"{_TOWER}.vision_model.*"


GEMMA3 = TowerReader(
    model_types=("gemma3",),
    names=tuple(each for newer in ("", "model.") for each in _names(newer)),
    read=_read,
)
