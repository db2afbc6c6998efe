"""The settings of models that see: `format_vision`, the inverse of the towers' readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cadenza.models.towers.reader import ACTIVATIONS
from cadenza.vision.idefics3 import Idefics3Processor
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import CHANNELS, FILTERS
from cadenza.vision.tower_config import TowerConfig, VisionConfig
from cadenza.vision.whole_images import Gemma3Images, Gemma4Images, PixtralImages, QwenImages


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedVision:
    """The inverse of reading: entries of config.json, of its text model, and the processor's
    settings."""

    config: dict[str, object]
    processor: dict[str, object]
    text: dict[str, object] = field(default_factory=dict[str, object])


def format_vision(vision: VisionConfig) -> FormattedVision:
    """Of a model of any family."""
    return _FORMATS.get(vision.family, _format_qwen)(vision)


def _format_idefics3(vision: VisionConfig) -> FormattedVision:
    processor, tower = vision.processor, vision.tower
    assert isinstance(processor, Idefics3Processor), "read by this module"
    name = "SmolVLM" if vision.family == "smolvlm" else "Idefics3"
    return FormattedVision(
        config={
            "image_token_id": vision.image_token_id,
            "scale_factor": tower.merge,
            "vision_config": {"model_type": f"{vision.family}_vision", **format_siglip(tower)},
        },
        processor={
            "image_processor_type": f"{name}ImageProcessor",
            "processor_class": f"{name}Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"longest_edge": processor.longest_edge},
            "do_image_splitting": processor.splits,
            "max_image_size": {"longest_edge": processor.tile},
            "resample": FILTERS.index(processor.resample),
            "do_rescale": True,
            "do_normalize": True,
            "do_pad": True,
            **format_normalisation(processor.normalisation),
        },
    )


def _format_gemma3(vision: VisionConfig) -> FormattedVision:
    processor, tower = vision.processor, vision.tower
    assert isinstance(processor, Gemma3Images), "read by this module"
    return FormattedVision(
        config={
            "image_token_index": vision.image_token_id,
            "mm_tokens_per_image": vision.max_part_tokens,
            "vision_config": {"model_type": "siglip_vision_model", **format_siglip(tower)},
        },
        processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": dict.fromkeys(("height", "width"), processor.side),
            "resample": FILTERS.index(processor.resample),
            "do_rescale": True,
            "do_normalize": True,
            "do_pan_and_scan": None,
            **format_normalisation(processor.normalisation),
        },
    )


def _format_gemma4(vision: VisionConfig) -> FormattedVision:
    processor, tower = vision.processor, vision.tower
    assert isinstance(processor, Gemma4Images), "read by this module"
    assert tower.table is not None, "a tower of Gemma 4 has a table"
    assert tower.rope is not None, "a tower of Gemma 4 has a rope"
    own = {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "num_key_value_heads": tower.num_heads,
        "head_dim": tower.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rope.theta},
        "position_embedding_size": tower.table.side,
        "use_clipped_linears": tower.clips_linears,
        "standardize": tower.standardizes,
    }
    return _formatted_gemma4(vision, processor, own)


def _format_gemma4_unified(vision: VisionConfig) -> FormattedVision:
    processor, tower = vision.processor, vision.tower
    assert isinstance(processor, Gemma4Images), "read by this module"
    assert tower.table is not None, "the unified model has a table"
    own = {
        "mm_embed_dim": tower.hidden_size,
        "output_proj_dims": tower.hidden_size,
        "mm_posemb_size": tower.table.side,
    }
    return _formatted_gemma4(vision, processor, own)


def _formatted_gemma4(
    vision: VisionConfig, processor: Gemma4Images, own: Mapping[str, object]
) -> FormattedVision:
    sizes = {"patch_size": processor.patch_size, "pooling_kernel_size": processor.merge_size}
    name = "Gemma4Unified" if processor.is_unified else "Gemma4"
    tower = {"rms_norm_eps": vision.tower.projector.norm_eps, **sizes, **own}
    return FormattedVision(
        config={
            "image_token_id": vision.image_token_id,
            "vision_config": {"model_type": f"{vision.family}_vision", **tower},
        },
        processor={
            "image_processor_type": f"{name}ImageProcessor",
            "processor_class": f"{name}Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": FILTERS.index(processor.resample),
            "do_rescale": True,
            "rescale_factor": processor.factor,
            "do_normalize": False,
            "max_soft_tokens": processor.max_tokens,
            **sizes,
        },
        text={
            "use_bidirectional_attention": None if vision.reach is None else "vision",
            "pad_token_id": vision.fill_token_id,
        },
    )


def _format_mistral3(vision: VisionConfig) -> FormattedVision:
    processor, tower = vision.processor, vision.tower
    assert isinstance(processor, PixtralImages), "read by this module"
    assert tower.rope is not None, "the tower has a rope"
    of_name = {own: name for name, own in reversed(ACTIVATIONS.items())}
    _, linear, _ = tower.projector.linears
    assert linear.activation is not None, "the projector has an activation"
    return FormattedVision(
        config={
            "image_token_index": vision.image_token_id,
            "spatial_merge_size": tower.merge,
            "vision_feature_layer": -1,
            "projector_hidden_act": of_name[linear.activation],
            "multimodal_projector_bias": linear.has_bias,
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": tower.hidden_size,
                "intermediate_size": tower.intermediate_size,
                "num_hidden_layers": tower.num_layers,
                "num_attention_heads": tower.num_heads,
                "head_dim": tower.head_dim,
                "num_channels": CHANNELS,
                "image_size": processor.longest_edge,
                "patch_size": tower.patch_size,
                "hidden_act": of_name[tower.activation],
                "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rope.theta},
            },
        },
        processor={
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"longest_edge": processor.longest_edge},
            "patch_size": tower.patch_size,
            "spatial_merge_size": tower.merge,
            "resample": FILTERS.index(processor.resample),
            "do_rescale": True,
            "do_normalize": True,
            **format_normalisation(processor.normalisation),
        },
    )


def _format_qwen(vision: VisionConfig) -> FormattedVision:
    tower, processor = vision.tower, vision.processor
    assert isinstance(processor, QwenImages), "read by this module"
    width_key = "embed_dim" if vision.family == "qwen2_vl" else "hidden_size"
    width = tower.projector.linears[-1].num_out
    settings: dict[str, object] = {
        "model_type": f"{vision.family}_vision",
        "depth": tower.num_layers,
        width_key: tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_heads,
        "in_channels": CHANNELS,
        "patch_size": tower.patch_size,
        "temporal_patch_size": tower.patch_shape[1],
        "spatial_merge_size": tower.merge,
        "hidden_act": next(key for key, own in ACTIVATIONS.items() if own == tower.activation),
        "hidden_size" if vision.family == "qwen2_vl" else "out_hidden_size": width,
        **_format_own_of_qwen(vision),
    }
    return FormattedVision(
        config={"image_token_id": vision.image_token_id, "vision_config": settings},
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {
                "shortest_edge": processor.min_pixels,
                "longest_edge": processor.max_pixels,
            },
            "patch_size": processor.patch_size,
            "temporal_patch_size": processor.temporal_size,
            "merge_size": processor.merge_size,
            "resample": FILTERS.index(processor.resample),
            "do_rescale": True,
            "do_normalize": True,
            **format_normalisation(processor.normalisation),
        },
    )


def _format_own_of_qwen(vision: VisionConfig) -> dict[str, object]:
    """The settings that only some generations have."""
    tower, found = vision.tower, dict[str, object]()
    if tower.table is not None:
        found["num_position_embeddings"] = tower.table.num_rows
    if vision.family in ("qwen3_vl", "qwen3_vl_moe"):
        found["deepstack_visual_indexes"] = list(tower.deepstack_layers)
    if tower.windows is not None:
        found["window_size"] = tower.windows.side * tower.patch_size * tower.merge
        found["fullatt_block_indexes"] = list(tower.windows.full_layers)
    if vision.family == "qwen2_vl":
        found["mlp_ratio"] = tower.intermediate_size // tower.hidden_size
    return found


def format_siglip(tower: TowerConfig) -> dict[str, object]:
    """The inverse of `read_siglip`: a `vision_config`."""
    assert tower.table is not None, "a SigLIP tower has a table"
    activation = next(name for name, own in ACTIVATIONS.items() if own == tower.activation)
    return {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "num_channels": CHANNELS,
        "image_size": tower.table.side * tower.patch_size,
        "patch_size": tower.patch_size,
        "hidden_act": activation,
        "layer_norm_eps": tower.norm_eps,
    }


def format_normalisation(normalisation: Normalisation) -> dict[str, object]:
    """The inverse of `read_normalisation`."""
    return {
        "rescale_factor": normalisation.factor,
        "image_mean": list(normalisation.mean),
        "image_std": list(normalisation.std),
    }


_FORMATS: Mapping[str, Callable[[VisionConfig], FormattedVision]] = {
    "smolvlm": _format_idefics3,
    "idefics3": _format_idefics3,
    "gemma3": _format_gemma3,
    "gemma4": _format_gemma4,
    "gemma4_unified": _format_gemma4_unified,
    "mistral3": _format_mistral3,
}
"""By the family; the others are Qwen's."""
