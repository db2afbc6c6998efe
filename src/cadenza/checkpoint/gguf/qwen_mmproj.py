"""llama.cpp's projectors of Qwen3-VL and 3.5, Qwen2.5-VL and Qwen2-VL (conversion/qwen3vl.py,
qwenvl.py, tools/mtmd/clip.cpp). The files lack a patch's temporal size, whose slices are tensors of
their own, the resampling filter, bounds of pixels, and the side of windows; their constant of norms
is the text model's."""

from collections.abc import Callable
from typing import cast

import numpy as np

from cadenza.checkpoint.gguf.clip_projector import (
    ClipProjector,
    ProjectorFile,
    TensorMap,
    map_linear,
    map_norm,
    normalisation_settings,
)
from cadenza.errors import CheckpointError
from cadenza.models.model_config import MAX_LAYERS
from cadenza.models.tower_spec import TowerSpec, declare_tower
from cadenza.models.towers.qwen import QWEN
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.stored_tensor import AnyArray, StoredWeight

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
    merge = file.vision("spatial_merge_size")
    return {
        "model_type": model_type,
        "image_token_id": file.token_id(_PLACEHOLDER),
        "vision_config": {
            **{name: file.vision(key) for name, key in keys.items()},
            "hidden_size": file.vision("embedding_length"),
            "temporal_patch_size": _TEMPORAL_SIZE,
            "spatial_merge_size": 2 if merge is None else merge,
        },
    }


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
        merge = file.vision("spatial_merge_size")
        return {
            **normalisation_settings(file),
            "size": {"shortest_edge": least, "longest_edge": most},
            "min_pixels": file.vision("image_min_pixels"),
            "max_pixels": file.vision("image_max_pixels"),
            "patch_size": file.vision("patch_size"),
            "temporal_patch_size": _TEMPORAL_SIZE,
            "merge_size": 2 if merge is None else merge,
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


QWEN_PROJECTORS = {
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
}
