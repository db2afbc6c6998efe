"""Idefics3 and SmolVLM: a SigLIP tower, joined patches, one linear. Source: transformers,
models/idefics3 and models/smolvlm."""

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.towers.reader import (
    MAX_PIXELS_OF_SIDE,
    SiglipDefaults,
    TowerReader,
    VisionFiles,
    check_steps,
    read_filter,
    read_image_token,
    read_normalisation,
    read_siglip,
)
from cadenza.vision.idefics3 import Idefics3Processor
from cadenza.vision.patches import Normalisation
from cadenza.vision.tower_config import (
    ProjectorConfig,
    ProjectorLinear,
    TowerNames,
    VisionConfig,
)

MAX_SIDE = 32  # patches along a token's side

NAMES = TowerNames(
    patch="model.vision_model.embeddings.patch_embedding",
    positions="model.vision_model.embeddings.position_embedding.weight",
    post_norm="model.vision_model.post_layernorm",
    layers="model.vision_model.encoder.layers",
)
PROJECTION = "model.connector.modality_projection.proj"

_IMAGE_TOKEN = 128_257
_DEFAULTS = SiglipDefaults(hidden_size=1152, num_heads=16, patch_size=32)
_TILE = 364  # transformers' defaults


def _read(files: VisionFiles) -> VisionConfig:
    raw = files.config
    side = raw.integer("scale_factor", 1, MAX_SIDE, 2)
    linear = ProjectorLinear(name=PROJECTION, num_out=files.text.hidden_size, has_bias=False)
    projector = ProjectorConfig(side=side, linears=(linear,))
    tower = read_siglip(files.tower, _DEFAULTS, projector, NAMES)
    processor = _read_processor(files.processor, tower.patch_size, side)
    assert tower.table is not None, "a SigLIP tower has a table"
    patches = processor.tile // tower.patch_size
    if patches != tower.table.side or patches % side:
        raise CheckpointError(
            f"{files.processor.where}: tiles of {processor.tile} pixels have {patches} patches a "
            f"side; the tower has positions for {tower.table.side}, and {side} of them make a token"
        )
    token_id = read_image_token(files, _IMAGE_TOKEN)
    return VisionConfig(
        family=raw.text("model_type") or "smolvlm",
        tower=tower,
        processor=processor,
        image_token_id=token_id,
        fill_token_id=token_id,
        max_part_tokens=processor.side**2,
    )


def _read_processor(raw: JsonObject, patch_size: int, side: int) -> Idefics3Processor:
    check_steps(raw, "do_normalize")
    tile = _longest_edge(raw, "max_image_size", _TILE)
    return Idefics3Processor(
        longest_edge=_longest_edge(raw, "size", 4 * _TILE),
        tile=tile,
        patch_size=patch_size,
        merge=side,
        splits=raw.flag("do_image_splitting", True),
        resample=read_filter(raw, "lanczos"),
        normalisation=read_normalisation(raw, Normalisation()),
    )


def _longest_edge(raw: JsonObject, key: str, default: int) -> int:
    inner = raw.child(key)
    if inner is None:
        return default
    return inner.integer("longest_edge", 1, MAX_PIXELS_OF_SIDE)


IDEFICS3 = TowerReader(
    model_types=("smolvlm", "idefics3"),
    names=(
        ("model.vision_model.*", "model.vision_model.*"),
        ("model.connector.*", "model.connector.*"),
    ),
    read=_read,
)
