"""Gemma 4: sandwiched RMS norms, a rope of two halves, linears that may be clipped, blocks of
patches averaged, one product; and the unified model, which has no tower: a patch is a token.
Source: transformers, models/gemma4 and models/gemma4_unified."""

import math

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.model_config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
)
from cadenza.models.towers.reader import TowerReader, VisionFiles, read_filter
from cadenza.models.towers.siglip import MAX_PATCH, read_tower_activation
from cadenza.models.wrapped_text import TEXT_CONFIG
from cadenza.vision.gemma_images import BUDGETS, Gemma4Images, budget_within
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

TOWER, EMBEDDER = "model.vision_tower", "model.embed_vision"
NAMES = TowerNames(
    patch=f"{TOWER}.patch_embedder.input_proj",
    positions=f"{TOWER}.patch_embedder.position_embedding_table",
    layers=f"{TOWER}.encoder.layers",
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
    std_bias=f"{TOWER}.std_bias",
    std_scale=f"{TOWER}.std_scale",
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

_IMAGE_TOKEN = 258_880
_LAYER_NORM_EPS = 1e-5  # PyTorch's default, which the unified model has

_HEAD_DIM = 64  # of no head, where there are no layers

_STEPS = ("do_resize", "do_rescale", "do_convert_rgb")


def _read(files: VisionFiles) -> VisionConfig:
    raw, text = files.tower, files.text
    processor = _read_processor(files, raw, is_unified=False)
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
        names=NAMES,
        norm="rms",
        activation=read_tower_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        table=PatchTable(
            rule="sum", side=raw.integer("position_embedding_size", 1, 1 << 20, 10 * 1024)
        ),
        rope=TowerRope(theta=_theta(raw), columns_first=True, halves_are_apart=True),
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
    processor = _read_processor(files, raw, is_unified=True)
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
        image_token_id=raw.integer("image_token_id", 0, MAX_VOCAB_SIZE, _IMAGE_TOKEN),
        fill_token_id=fill,
        max_part_tokens=processor.max_tokens,
        reach=reach,
    )


def _theta(raw: JsonObject) -> float:
    rope = raw.child("rope_parameters") or JsonObject({}, raw.where)
    if rope.text("rope_type") not in (None, "axial", "default"):
        raise rope.wrong("rope_type", "axial, or absent")
    return rope.number("rope_theta", 1.0, 1e9, 100.0)


def _read_processor(files: VisionFiles, tower: JsonObject, *, is_unified: bool) -> Gemma4Images:
    raw = files.processor
    for step in _STEPS:
        if not raw.flag(step, True):
            raise raw.wrong(step, "true, or absent")
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
    names=((f"{TOWER}.*", f"{TOWER}.*"), (f"{EMBEDDER}.*", f"{EMBEDDER}.*")),
    read=_read,
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
