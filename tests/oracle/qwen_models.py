"""Tiny Qwen models that see, as transformers makes and saves them, and what it computes with them.

Weights are random and large enough that errors show; both files of processors' settings occur.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

IMAGE_TOKEN = 7
VOCAB_SIZE = 331
BANNED = 7, 8, 9, 10
"""No model generates placeholders; nor do tests the words around images."""

UNIT = 8
"""Pixels on a side of what one token stands for."""

Float32Array = npt.NDArray[np.float32]

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
TABLE = {"num_position_embeddings": 25, "out_hidden_size": 48}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
OUTER = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
}


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": list(sections),
            **more,
        }
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 16, **rope(3, 3, 2)},
        "vision_config": {**TOWER, **TABLE, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **MIXTURE, "head_dim": 16, **rope(4, 2, 2)},
        "vision_config": {**TOWER, **TABLE, "deepstack_visual_indexes": [1]},
    },
    "qwen3_5": {
        "text_config": {**TEXT, **HYBRID, **rope(2, 1, 1, partial_rotary_factor=0.25)},
        "vision_config": {**TOWER, **TABLE},
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            **rope(3, 3, 2),
        },
        "vision_config": {
            **TOWER,
            "out_hidden_size": 48,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen2_vl": {
        "text_config": {
            **TEXT,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            **rope(2, 3, 3),
        },
        "vision_config": {
            **{key: value for key, value in TOWER.items() if key != "intermediate_size"},
            "embed_dim": 32,
            "hidden_size": 48,
            "mlp_ratio": 2,
        },
    },
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 4 * UNIT**2, "longest_edge": 70 * UNIT**2},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.4],
}


def write_model(model_type: str, folder: Path, seed: int = 0) -> None:
    """A checkpoint saved by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(model_type, **CONFIGS[model_type], **OUTER)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    adds_one = model_type.startswith("qwen3_5")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_drawn(name, noise, adds_one=adds_one))
    model.save_pretrained(folder)
    nested = model_type in ("qwen3_vl", "qwen2_vl")
    name = "processor_config.json" if nested else "preprocessor_config.json"
    content = {"image_processor": PROCESSOR} if nested else PROCESSOR
    (folder / name).write_text(json.dumps(content))


def _drawn(name: str, noise: Any, *, adds_one: bool) -> Any:
    if name.endswith("bias") or "dt_bias" in name:
        return 0.2 * noise
    if name.endswith("A_log"):
        return noise - 3.0
    if "norm" in name or "ln_q" in name:
        is_shifted = adds_one and "visual" not in name and "linear_attn" not in name
        return 1 + 0.2 * noise - float(is_shifted)
    if "pos_embed" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    fan_in = noise[0].numel() if "patch_embed" in name else noise.shape[-1]
    gain = 2.0 if "q_proj" in name or "qkv" in name else 2.4 if "lm_head" in name else 1.0
    return noise * gain / fan_in**0.5


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with a run of image tokens for each image."""

    token_ids: list[int]
    images: list[Image.Image]


@dataclass(frozen=True, slots=True)
class Theirs:
    """What transformers computes: the prompt with greedy tokens, logits [T, V] of all but the last,
    and rotary positions [T, 3]."""

    token_ids: list[int]
    logits: Float32Array
    positions: npt.NDArray[np.int64]


def preprocess(images: list[Image.Image]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    return Qwen2VLImageProcessorPil(**settings)(images, return_tensors="pt")


def embed(model: Any, image: Image.Image) -> Float32Array:
    """The rows of an image, with those of deepstack beside them: [tokens, parts E]."""
    import torch

    given = preprocess([image])
    with torch.inference_mode():
        found = model.model.get_image_features(
            given["pixel_values"], given["image_grid_thw"], return_dict=True
        )
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return np.concatenate([torch.cat(list(part)).numpy() for part in parts], axis=1)


def decode_greedily(model: Any, prompt: Prompt, num_tokens: int) -> Theirs:
    """Each token from the whole sequence before it; none of `BANNED`."""
    import torch

    given: dict[str, Any] = dict(preprocess(prompt.images)) if prompt.images else {}
    ids = list(prompt.token_ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = _forward(model, ids, given)
            logits[-1][list(BANNED)] = -torch.inf
            ids.append(int(logits[-1].argmax()))
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE_TOKEN).int()
        positions = torch.arange(len(ids)).expand(3, -1)
        if given:
            positions = model.model.get_rope_index(
                tokens, mm_token_type_ids=kinds, image_grid_thw=given["image_grid_thw"]
            )[0][:, 0]
        return Theirs(ids, _forward(model, ids[:-1], given).numpy(), positions.T.numpy())


def _forward(model: Any, ids: list[int], given: dict[str, Any]) -> Any:
    """Logits [T, V]."""
    import torch

    tokens = torch.tensor([ids])
    model.model.rope_deltas = None
    kinds = (tokens == IMAGE_TOKEN).int()
    return model(input_ids=tokens, mm_token_type_ids=kinds, use_cache=False, **given).logits[0]
