"""What llama.cpp means by each `clip.projector_type` (conversion/, tools/mtmd/clip.cpp): where the
tensors of a projector lie, and what its files do not say: filters and sizes of images, budgets of
tokens, a patch's temporal size, the side of windows, in which layers images attend both ways."""

import math
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.gguf.clip_projector import (
    ClipProjector,
    ProjectorFile,
    TensorMap,
    map_linear,
    map_norm,
    normalisation_settings,
    siglip_settings,
)
from cadenza.errors import CheckpointError
from cadenza.models.model_config import MAX_LAYERS
from cadenza.models.tower_spec import TowerSpec, declare_tower
from cadenza.models.towers.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from cadenza.models.towers.idefics3 import IDEFICS3
from cadenza.models.towers.qwen import QWEN
from cadenza.vision.processor import CHANNELS
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.stored_tensor import AnyArray, StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec, tensors_of

_GEMMA3_MERGE, _GEMMA4_MERGE = 4, 3  # patches on a side of a token, where the file does not say

_BILINEAR, _BICUBIC = 2, 3
_SOFT_TOKENS = 280
_NORM = "mm.soft_emb_norm.weight"
_PATCH, _TABLE = "v.patch_embd.weight", "v.position_embd.weight"
# in the order in which a layer's bounds are declared
_PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")


def _number(file: ProjectorFile, key: str) -> int:
    value = file.vision(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{file.metadata.where}: clip.vision.{key} is {value}; it must be a whole number of 1 "
            f"or more; convert the model again"
        )
    return value


def _merge(file: ProjectorFile, default: int) -> int:
    found = file.vision("projector.scale_factor")
    return found if isinstance(found, int) and found > 0 else default


def _gemma3_config(file: ProjectorFile) -> dict[str, object]:
    patches = _number(file, "image_size") // _number(file, "patch_size")
    side = patches // _merge(file, _GEMMA3_MERGE)
    return {
        "model_type": "gemma3",
        "image_token_index": file.token_id("<image_soft_token>"),
        "mm_tokens_per_image": side * side,
        "vision_config": siglip_settings(file),
    }


def _gemma3_processor(file: ProjectorFile) -> dict[str, object]:
    side = file.vision("image_size")
    return {
        **normalisation_settings(file),
        "size": {"height": side, "width": side},
        "resample": _BILINEAR,
    }


def _gemma3_projectors(tower: TowerSpec) -> TensorMap:
    (linear,) = tower.projectors[0].linears
    return map_linear("mm.input_projection", linear)


def _gemma3_norm(file: ProjectorFile, vision: VisionConfig) -> dict[str, StoredWeight]:
    """The converter adds 1, which the folder's weight lacks; subtracting it is exact."""
    norm = declare_tower(vision).projectors[0].norm
    assert norm is not None, "the projector has a norm"
    part = file.tensor(_NORM, norm.weight.shape)
    return {norm.weight.name: _weight(norm.weight, part, lambda stored: stored - np.float32(1.0))}


def _gemma4_config(file: ProjectorFile) -> dict[str, object]:
    width, num_heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    return {
        "model_type": "gemma4",
        "image_token_id": file.token_id("<|image|>"),
        "text_config": _text_settings(file),
        "vision_config": {
            "hidden_size": width,
            "intermediate_size": file.vision("feed_forward_length"),
            "num_hidden_layers": file.vision("block_count"),
            "num_attention_heads": num_heads,
            "head_dim": width // num_heads,
            "position_embedding_size": _table_rows(file),
            "use_clipped_linears": f"v.blk.0.{_PRODUCTS[0]}.input_min" in _names(file),
            "standardize": "v.std_bias" in _names(file),
        },
    }


def _unified_config(file: ProjectorFile) -> dict[str, object]:
    return {
        "model_type": "gemma4_unified",
        "image_token_id": file.token_id("<|image|>"),
        "text_config": _text_settings(file),
        "vision_config": {
            "mm_embed_dim": file.vision("embedding_length"),
            "mm_posemb_size": _table_rows(file),
        },
    }


def _text_settings(file: ProjectorFile) -> dict[str, object]:
    """Only the models with per-layer embeddings, E2B and E4B, attend to images as to text."""
    is_causal = file.text.layer_inputs is not None
    return {"use_bidirectional_attention": None if is_causal else "vision"}


def _gemma4_processor(file: ProjectorFile) -> dict[str, object]:
    merge = _merge(file, _GEMMA4_MERGE)
    return {
        "patch_size": _number(file, "patch_size"),
        "pooling_kernel_size": merge,
        "max_soft_tokens": _SOFT_TOKENS,
        "do_normalize": False,
        "resample": _BICUBIC,
    }


def _gemma4_projectors(tower: TowerSpec) -> TensorMap:
    (linear,) = tower.projectors[0].linears
    tensors = map_linear("mm.input_projection", linear)
    if (standard := tower.projectors[0].standard) is not None:
        bias, scale = standard
        tensors |= {"v.std_bias": (bias,), "v.std_scale": (scale,)}
    return tensors


def _gemma4_made(file: ProjectorFile, vision: VisionConfig) -> dict[str, StoredWeight]:
    """The patches' weight, whose values are stored channel by channel, and the bounds of linears,
    which are stored as vectors of one number."""
    spec, size = declare_tower(vision).entry.patch.weight, vision.tower.patch_size
    part = file.tensor(_PATCH, (spec.shape[0], CHANNELS, size, size))
    made = {spec.name: _weight(spec, part, lambda stored: _channels_last(stored, size))}
    for index, layer in enumerate(declare_tower(vision).layers):
        bounds = iter(layer.bounds)
        for name in _PRODUCTS if layer.bounds else ():
            for bound in ("input_min", "input_max", "output_min", "output_max"):
                own = next(bounds)
                part = file.tensor(f"v.blk.{index}.{name}.{bound}", (1,))
                made[own.name] = _weight(own, part, lambda stored: stored.reshape(()))
    return made


def _unified_made(file: ProjectorFile, vision: VisionConfig) -> dict[str, StoredWeight]:
    """The patches' weight and their norm, stored channel by channel; the table, whose axes are
    outer ones there; and norms, which are numbered from 1."""
    declared, size = declare_tower(vision), vision.tower.patch_size
    spec, table, norms = declared.entry.patch.weight, declared.table, declared.entry.patch_norms
    assert table is not None, "the model has a table"
    assert norms is not None, "the patches are normed"
    made = {
        spec.name: _weight(
            spec, file.tensor(_PATCH, spec.shape), lambda stored: _channels_last(stored, size)
        ),
        table.name: _weight(
            table,
            file.tensor(_TABLE, (2, table.shape[0], table.shape[2])),
            lambda stored: stored.swapaxes(0, 1),
        ),
    }
    for each in tensors_of(norms[0]):
        part = file.tensor(f"v.patch_norm.1.{each.name.rsplit('.', 1)[1]}", each.shape)
        made[each.name] = _weight(each, part, lambda stored: _channels_last(stored[None], size)[0])
    return made


def _unified_projectors(tower: TowerSpec) -> TensorMap:
    (linear,) = tower.projectors[0].linears
    assert tower.entry.patch_norms is not None, "the patches are normed"
    tensors = map_linear("mm.input_projection", linear)
    return tensors | map_norm("v.patch_norm.2", tower.entry.patch_norms[1])


def _channels_last(stored: AnyArray, size: int) -> npt.NDArray[np.float32]:
    """[E, size x size x channels] of what has the values of each channel together."""
    by_channel = stored.reshape(len(stored), CHANNELS, size, size)
    return by_channel.transpose(0, 2, 3, 1).reshape(len(stored), -1)


def _names(file: ProjectorFile) -> dict[str, object]:
    return dict(file.file.header.tensors)


def _table_rows(file: ProjectorFile) -> int:
    table = file.file.header.tensors.get(_TABLE)
    return 1 if table is None or len(table.shape) != 3 else table.shape[1]


def _weight(
    spec: TensorSpec, part: StoredTensor, turned: Callable[[AnyArray], AnyArray]
) -> StoredWeight:
    def load() -> AnyArray:
        return turned(part.array())

    assert math.prod(spec.shape) == math.prod(part.shape), "only the order is another"
    return StoredWeight(
        shape=spec.shape, stored_type=part.stored_type, format=None, parts=(part,), load=load
    )


_PLACEHOLDER = "<|image_pad|>"
_TEMPORAL_SIZE = 2
_SLICES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
# the whole model's type by that of its text model
_QWEN3_TYPES = {
    "qwen3_moe": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

# least and most pixels of a resized image in the published processors' files
_PUBLISHED_PIXELS = {
    "qwen3_vl": (65_536, 16_777_216),
    "qwen2_5_vl": (3136, 12_845_056),
    "qwen2_vl": (3136, 12_845_056),
}


def _config(file: ProjectorFile, model_type: str) -> dict[str, object]:
    keys = {
        "depth": "block_count",
        "num_heads": "attention.head_count",
        "intermediate_size": "feed_forward_length",
        "patch_size": "patch_size",
    }
    return {
        "model_type": model_type,
        "image_token_id": file.token_id(_PLACEHOLDER),
        "vision_config": {
            **{name: file.vision(key) for name, key in keys.items()},
            "hidden_size": file.vision("embedding_length"),
            "temporal_patch_size": _TEMPORAL_SIZE,
            "spatial_merge_size": _qwen_merge(file),
        },
    }


def _qwen_merge(file: ProjectorFile) -> object:
    merge = file.vision("spatial_merge_size")
    return 2 if merge is None else merge


def _with(config: dict[str, object], **own: object) -> dict[str, object]:
    settings = cast(dict[str, object], config["vision_config"])
    return {**config, "vision_config": {**settings, **own}}


def _qwen3_config(file: ProjectorFile) -> dict[str, object]:
    """Qwen3.5's files have no layers of deepstack, and are otherwise those of Qwen3-VL."""
    flags = file.vision("is_deepstack_layers")
    items = cast(list[object], flags) if isinstance(flags, list) else []
    layers = [index for index, flag in enumerate(items) if flag]
    table = file.file.header.tensors.get("v.position_embd.weight")
    positions = None if table is None else table.shape[0]
    return _with(
        _config(file, _QWEN3_TYPES.get(file.text.family, "qwen3_vl")),
        out_hidden_size=file.text.hidden_size,
        num_position_embeddings=positions,
        deepstack_visual_indexes=layers,
    )


def _qwen25_config(file: ProjectorFile) -> dict[str, object]:
    interval = file.vision("n_wa_pattern")
    depth = file.vision("block_count")
    if not isinstance(interval, int) or not isinstance(depth, int) or not 0 < depth <= MAX_LAYERS:
        raise CheckpointError(
            f"{file.metadata.where}: clip.vision.n_wa_pattern or block_count is missing; fetch the "
            f"file again"
        )
    return _with(
        _config(file, "qwen2_5_vl"),
        hidden_act="silu",
        out_hidden_size=file.text.hidden_size,
        fullatt_block_indexes=[*range(interval - 1, depth, interval)] if interval > 0 else [],
    )


def _qwen2_config(file: ProjectorFile) -> dict[str, object]:
    """The widths of its MLPs are 4 times the tower's; the file has the text model's there."""
    return _with(
        _config(file, "qwen2_vl"),
        embed_dim=file.vision("embedding_length"),
        hidden_size=file.text.hidden_size,
        intermediate_size=None,
    )


def _processor(model_type: str) -> Callable[[ProjectorFile], dict[str, object]]:
    least, most = _PUBLISHED_PIXELS[model_type]

    def processor(file: ProjectorFile) -> dict[str, object]:
        return {
            **normalisation_settings(file),
            "size": {"shortest_edge": least, "longest_edge": most},
            "min_pixels": file.vision("image_min_pixels"),
            "max_pixels": file.vision("image_max_pixels"),
            "patch_size": file.vision("patch_size"),
            "temporal_patch_size": _TEMPORAL_SIZE,
            "merge_size": _qwen_merge(file),
        }

    return processor


def _projectors(tower: TowerSpec) -> TensorMap:
    """The merger's norm is stored as that after the last layer."""
    main = tower.projectors[0]
    first, second = main.linears
    tensors = map_norm("v.post_ln", main.norm)
    return tensors | map_linear("mm.0", first) | map_linear("mm.2", second)


def _map_deepstack(vision: VisionConfig, tower: TowerSpec) -> TensorMap:
    tensors: TensorMap = {}
    layers = vision.tower.deepstack_layers
    for layer, projector in zip(layers, tower.projectors[1:], strict=True):
        first, second = projector.linears
        prefix = f"v.deepstack.{layer}"
        tensors |= map_norm(f"{prefix}.norm", projector.norm)
        tensors |= map_linear(f"{prefix}.fc1", first) | map_linear(f"{prefix}.fc2", second)
    return tensors


def _joined_patches(file: ProjectorFile, vision: VisionConfig) -> dict[str, StoredWeight]:
    """The patches' weight, from the slices of both times."""
    spec = declare_tower(vision).entry.patch.weight
    stored = file.file.header.tensors
    missing = [name for name in _SLICES if name not in stored]
    if missing:
        raise CheckpointError(
            f"{file.metadata.where} lacks {missing[0]}, a slice of the patches' weight; fetch the "
            f"file again"
        )
    shape = (spec.shape[0], spec.shape[1], *spec.shape[3:])
    parts = tuple(file.tensor(name, shape) for name in _SLICES)

    def load() -> AnyArray:
        return np.stack([part.array() for part in parts], axis=2)

    return {
        spec.name: StoredWeight(
            shape=spec.shape, stored_type=parts[0].dtype, format=None, parts=parts, load=load
        )
    }


def _idefics3_config(file: ProjectorFile) -> dict[str, object]:
    """The converter writes 1e-5 where config.json leaves the constant of norms out; transformers
    takes 1e-6."""
    eps = file.vision("attention.layer_norm_epsilon")
    return {
        "model_type": "smolvlm",
        "image_token_id": file.token_id("<image>"),
        "scale_factor": file.vision("projector.scale_factor"),
        "vision_config": {
            **siglip_settings(file),
            "layer_norm_eps": None if eps == _CONVERTERS_EPS else eps,
        },
    }


def _idefics3_processor(file: ProjectorFile) -> dict[str, object]:
    return {
        **normalisation_settings(file),
        "size": {"longest_edge": file.vision("preproc_image_size")},
        "max_image_size": {"longest_edge": file.vision("image_size")},
        "do_image_splitting": True,
        "resample": _LANCZOS,
    }


def _idefics3_projectors(tower: TowerSpec) -> TensorMap:
    (linear,) = tower.projectors[0].linears
    return map_linear("mm.model.fc", linear)


_CONVERTERS_EPS = 1e-5
_LANCZOS = 1


# by `clip.projector_type`
PROJECTORS: Mapping[str, ClipProjector] = {
    "idefics3": ClipProjector(
        reader=IDEFICS3,
        config=_idefics3_config,
        processor=_idefics3_processor,
        projectors=_idefics3_projectors,
    ),
    "qwen3vl_merger": ClipProjector(
        reader=QWEN,
        config=_qwen3_config,
        processor=_processor("qwen3_vl"),
        projectors=_projectors,
        deepstack=_map_deepstack,
        made=_joined_patches,
    ),
    "qwen2.5vl_merger": ClipProjector(
        reader=QWEN,
        config=_qwen25_config,
        processor=_processor("qwen2_5_vl"),
        projectors=_projectors,
        made=_joined_patches,
    ),
    "qwen2vl_merger": ClipProjector(
        reader=QWEN,
        config=_qwen2_config,
        processor=_processor("qwen2_vl"),
        projectors=_projectors,
        made=_joined_patches,
    ),
    "gemma3": ClipProjector(
        reader=GEMMA3,
        config=_gemma3_config,
        processor=_gemma3_processor,
        projectors=_gemma3_projectors,
        made=_gemma3_norm,
    ),
    "gemma4v": ClipProjector(
        reader=GEMMA4,
        config=_gemma4_config,
        processor=_gemma4_processor,
        projectors=_gemma4_projectors,
        made=_gemma4_made,
    ),
    "gemma4uv": ClipProjector(
        reader=GEMMA4_UNIFIED,
        config=_unified_config,
        processor=_gemma4_processor,
        projectors=_unified_projectors,
        made=_unified_made,
    ),
}
