"""Gemma 3: a SigLIP tower, blocks of patches averaged, a norm and one product. Gemma 4: sandwiched
RMS norms, a rope of two halves, linears that may be clipped, and its unified model, which has no
tower: a patch is a token. Source: transformers, models/gemma3, gemma4 and gemma4_unified."""

import math
from collections.abc import Iterator
from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.model_config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
)
from cadenza.models.towers.reader import (
    MAX_PATCH,
    MAX_PIXELS_OF_SIDE,
    SiglipDefaults,
    TowerReader,
    VisionFiles,
    check_steps,
    read_axial_theta,
    read_filter,
    read_normalisation,
    read_siglip,
    read_tower_activation,
)
from cadenza.models.wrapped_text import TEXT_CONFIG
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import CHANNELS
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    ProjectorLinear,
    Reach,
    TowerConfig,
    TowerNames,
    TowerRope,
    VisionConfig,
)
from cadenza.vision.whole_images import BUDGETS, Gemma3Images, Gemma4Images, budget_within
from cadenza.weights.weights import NameRule

_GEMMA3_NAMES = TowerNames()
_PROJECTOR = "multi_modal_projector"
_PROJECTION, _NORM = f"{_PROJECTOR}.mm_input_projection", f"{_PROJECTOR}.mm_soft_emb_norm"

_SIGLIP = "vision_tower"
_SIZE = ("height", "width")
_GEMMA3_TOKEN = 262_144
_TOKENS = 256


def _read_gemma3(files: VisionFiles) -> VisionConfig:
    raw = files.config
    num_tokens = raw.integer("mm_tokens_per_image", 1, 1 << 16, _TOKENS)
    tower = read_siglip(files.tower, SiglipDefaults(), _gemma3_projector(files), _GEMMA3_NAMES)
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
    token_id = raw.integer("image_token_index", 0, MAX_VOCAB_SIZE, _GEMMA3_TOKEN)
    return VisionConfig(
        family="gemma3",
        tower=tower,
        processor=_read_gemma3_images(files.processor, tower, patches),
        image_token_id=token_id,
        fill_token_id=token_id if token_id < files.text.vocab_size else 0,
        max_part_tokens=num_tokens,
        reach="all",
    )


def _gemma3_projector(files: VisionFiles) -> ProjectorConfig:
    """For one patch a token, until both are known."""
    linear = ProjectorLinear(name=_PROJECTION, num_out=files.text.hidden_size, has_bias=False)
    return ProjectorConfig(
        side=1,
        linears=(linear,),
        reduction="average",
        norm="rms",
        norm_name=_NORM,
        norm_eps=files.tower.number("layer_norm_eps", 1e-12, 1.0, 1e-6),
        norm_adds_one=True,
        norm_is_behind=True,
        is_transposed=True,
    )


def _read_gemma3_images(raw: JsonObject, tower: TowerConfig, patches: int) -> Gemma3Images:
    check_steps(raw, "do_normalize")
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
        normalisation=read_normalisation(raw, Normalisation()),
    )


def _names(newer: str) -> Iterator[NameRule]:
    """Newer files have `model.` before these names, or no `vision_model` in them; the product is no
    linear's there. The tower's own head is not opened."""
    tower = f"{newer}{_SIGLIP}"
    yield f"{newer}{_PROJECTION}_weight", f"{_PROJECTION}.weight"
    yield f"{newer}{_PROJECTOR}.*", f"{_PROJECTOR}.*"
    yield f"{tower}.vision_model.head.*", None
    yield f"{tower}.head.*", None
    yield f"{tower}.vision_model.*", f"{_SIGLIP}.vision_model.*"
    yield f"{tower}.*", f"{_SIGLIP}.vision_model.*"


GEMMA3 = TowerReader(
    model_types=("gemma3",),
    names=tuple(each for newer in ("", "model.") for each in _names(newer)),
    read=_read_gemma3,
)


_TOWER, EMBEDDER = "model.vision_tower", "model.embed_vision"
_GEMMA4_NAMES = TowerNames(
    patch=f"{_TOWER}.patch_embedder.input_proj",
    positions=f"{_TOWER}.patch_embedder.position_embedding_table",
    layers=f"{_TOWER}.encoder.layers",
    norm1="input_layernorm",
    post_norm1="post_attention_layernorm",
    norm2="pre_feedforward_layernorm",
    post_norm2="post_feedforward_layernorm",
    query="self_attn.q_proj.linear",
    key="self_attn.k_proj.linear",
    value="self_attn.v_proj.linear",
    out="self_attn.o_proj.linear",
    gate="mlp.gate_proj.linear",
    up="mlp.up_proj.linear",
    down="mlp.down_proj.linear",
    std_bias=f"{_TOWER}.std_bias",
    std_scale=f"{_TOWER}.std_scale",
)
PROJECTION = f"{EMBEDDER}.embedding_projection"

EMBED = "model.vision_embedder"
UNIFIED_NAMES = TowerNames(
    patch=f"{EMBED}.patch_dense",
    patch_norm=f"{EMBED}.patch_ln1",
    product_norm=f"{EMBED}.patch_ln2",
    positions=f"{EMBED}.pos_embedding",
    pre_norm=f"{EMBED}.pos_norm",
)

_GEMMA4_TOKEN = 258_880
_LAYER_NORM_EPS = 1e-5  # PyTorch's default, which the unified model has

_HEAD_DIM = 64  # of no head, where there are no layers


def _read_gemma4(files: VisionFiles) -> VisionConfig:
    raw, text = files.tower, files.text
    processor = _read_gemma4_images(files, raw, is_unified=False)
    width = raw.integer("hidden_size", 1, MAX_WIDTH, 768)
    num_heads = raw.integer("num_attention_heads", 1, MAX_HEADS, 12)
    if raw.integer("num_key_value_heads", 1, MAX_HEADS, num_heads) != num_heads:
        raise raw.wrong("num_key_value_heads", f"num_attention_heads, which is {num_heads}")
    if raw.flag("attention_bias", False):
        raise raw.wrong("attention_bias", "false, or absent")
    norm_eps = raw.number("rms_norm_eps", 1e-12, 1.0, 1e-6)
    head_dim = raw.integer("head_dim", 4, MAX_HEAD_DIM, 64)
    if head_dim % 4:
        raise raw.wrong("head_dim", "a multiple of 4")
    tower = TowerConfig(
        hidden_size=width,
        intermediate_size=raw.integer("intermediate_size", 1, MAX_WIDTH, 3072),
        num_layers=raw.integer("num_hidden_layers", 1, MAX_LAYERS, 16),
        num_heads=num_heads,
        head_dim=head_dim,
        patch_size=processor.patch_size,
        patch_shape=(CHANNELS * processor.patch_size**2,),
        norm_eps=norm_eps,
        projector=_projector(processor.merge_size, text.hidden_size, norm_eps),
        names=_GEMMA4_NAMES,
        norm="rms",
        activation=read_tower_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        table=PatchTable(
            rule="sum", side=raw.integer("position_embedding_size", 1, 1 << 20, 10 * 1024)
        ),
        rope=TowerRope(
            theta=read_axial_theta(raw, 100.0), columns_first=True, halves_are_apart=True
        ),
        has_patch_bias=False,
        has_attention_bias=False,
        has_mlp_bias=False,
        has_post_norms=True,
        has_head_norms=True,
        norms_values=True,
        is_gated=True,
        attention_scale=1.0,
        clips_linears=raw.flag("use_clipped_linears", False),
        output_scale=math.sqrt(width),
        standardizes=raw.flag("standardize", False),
    )
    return _vision(files, "gemma4", tower, processor)


def _read_unified(files: VisionFiles) -> VisionConfig:
    raw, text = files.tower, files.text
    processor = _read_gemma4_images(files, raw, is_unified=True)
    width = raw.integer("mm_embed_dim", 1, MAX_WIDTH, 3840)
    norm_eps = raw.number("rms_norm_eps", 1e-12, 1.0, 1e-6)
    tower = TowerConfig(
        hidden_size=width,
        intermediate_size=1,
        num_layers=0,
        num_heads=1,
        head_dim=_HEAD_DIM,
        patch_size=processor.unit,
        patch_shape=(CHANNELS * processor.unit**2,),
        norm_eps=_LAYER_NORM_EPS,
        projector=_projector(1, text.hidden_size, norm_eps),
        names=UNIFIED_NAMES,
        table=PatchTable(
            rule="sum", side=raw.integer("mm_posemb_size", 1, 1 << 20, 1120), axes_are_inner=True
        ),
        has_patch_norms=True,
        has_pre_norm=True,
    )
    return _vision(files, "gemma4_unified", tower, processor)


def _projector(side: int, num_out: int, norm_eps: float) -> ProjectorConfig:
    return ProjectorConfig(
        side=side,
        linears=(ProjectorLinear(name=PROJECTION, num_out=num_out, has_bias=False),),
        reduction="average",
        norm="rms",
        norm_eps=norm_eps,
        norm_is_behind=True,
    )


def _vision(
    files: VisionFiles, family: str, tower: TowerConfig, processor: Gemma4Images
) -> VisionConfig:
    raw = files.config
    text = raw.child(TEXT_CONFIG) or JsonObject({}, raw.where)
    reach: Reach | None = "windowed" if text.has("use_bidirectional_attention") else None
    fill = text.integer("pad_token_id", 0, MAX_VOCAB_SIZE, 0) if text.has("pad_token_id") else 0
    table, longest = tower.table, processor.max_tokens * tower.merge
    if table is not None and table.side < longest:
        raise CheckpointError(
            f"{files.tower.where}: the tower has positions for {table.side} patches on a side, and "
            f"an image of {processor.max_tokens} tokens may have {longest}; use the processor's "
            f"file of the same checkpoint"
        )
    return VisionConfig(
        family=family,
        tower=tower,
        processor=processor,
        image_token_id=raw.integer("image_token_id", 0, MAX_VOCAB_SIZE, _GEMMA4_TOKEN),
        fill_token_id=fill,
        max_part_tokens=processor.max_tokens,
        reach=reach,
    )


def _read_gemma4_images(files: VisionFiles, tower: JsonObject, *, is_unified: bool) -> Gemma4Images:
    raw = files.processor
    check_steps(raw)
    if raw.flag("do_normalize", False):
        raise raw.wrong("do_normalize", "false, or absent: the model takes values from 0 to 1")
    patch = raw.integer("patch_size", 1, MAX_PATCH, 16)
    merge = raw.integer("pooling_kernel_size", 1, 32, 3)
    for key, own in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if tower.integer(key, 1, MAX_PATCH, own) != own:
            raise raw.wrong(key, f"that of the tower, which is {tower.values[key]}")
    asked = raw.integer("max_soft_tokens", 1, BUDGETS[-1], 280)
    if asked not in BUDGETS:
        raise raw.wrong("max_soft_tokens", f"one of {', '.join(map(str, BUDGETS))}")
    budget = budget_within(files.max_tokens)
    if budget is None:
        raise CheckpointError(
            f"--image-max-tokens {files.max_tokens} is below {BUDGETS[0]}, the least that Gemma 4 "
            f"makes of an image; set {BUDGETS[0]} or more, or --no-images"
        )
    return Gemma4Images(
        patch_size=patch,
        merge_size=merge,
        max_tokens=min(asked, budget),
        is_unified=is_unified,
        resample=read_filter(raw, "bicubic"),
        factor=raw.number("rescale_factor", 1e-6, 1.0, 1.0 / 255.0),
    )


GEMMA4 = TowerReader(
    model_types=("gemma4",),
    names=((f"{_TOWER}.*", f"{_TOWER}.*"), (f"{EMBEDDER}.*", f"{EMBEDDER}.*")),
    read=_read_gemma4,
)

# Files that transformers wrote have all tensors of the unified model below one name.
GEMMA4_UNIFIED = TowerReader(
    model_types=("gemma4_unified",),
    names=(
        (f"{EMBED}.*", f"{EMBED}.*"),
        *(
            (f"{stored}.{own}*", f"{EMBED}.{own}*")
            for stored in (f"{EMBEDDER}.multimodal_embedder", EMBEDDER)
            for own in ("patch_", "pos_")
        ),
        (f"{EMBEDDER}.multimodal_embedder.*", f"{EMBEDDER}.*"),
        (f"{EMBEDDER}.*", f"{EMBEDDER}.*"),
    ),
    read=_read_unified,
)
