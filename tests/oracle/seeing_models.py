"""Tiny models of Gemma and Mistral that see, as transformers makes and saves them.

Their settings are those of the shapes of that name. Weights are random and large enough that errors
show; both files of processors' settings occur.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.random_checkpoint import named_shape
from tests.checkpoint.config_writer import format_files

Float32Array = npt.NDArray[np.float32]

SHAPES = (
    "tiny-gemma3-vl",
    "tiny-gemma4-vl",
    "tiny-gemma4-moe-vl",
    "tiny-gemma4-unified-vl",
    "tiny-mistral3-vl",
)


def write_model(shape: str, folder: Path, seed: int = 0) -> None:
    """A checkpoint saved by transformers, with the settings of the processor that we write."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    files = format_files(named_shape(shape))
    source = folder / "source"
    source.mkdir(parents=True)
    text = files["config.json"]["text_config"]
    assert isinstance(text, dict)
    # transformers' strict classes take no null for some settings of other models of the family.
    files["config.json"]["text_config"] = {k: v for k, v in text.items() if v is not None}
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(source)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    adds_one = "gemma3" in shape
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("inv_freq", "embed_scale", "softcap", "position_ids")):
                continue
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(_drawn(name, noise, tensor, adds_one=adds_one))
    model.save_pretrained(folder)
    processor = files["preprocessor_config.json"]
    nested = shape in ("tiny-gemma3-vl", "tiny-gemma4-vl")
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (folder / name).write_text(json.dumps({"image_processor": processor} if nested else processor))


def _drawn(name: str, noise: Any, old: Any, *, adds_one: bool) -> Any:
    if name.endswith(("_min", "_max")):
        return 2.0 * (1.0 if name.endswith("_max") else -1.0) + 0.2 * noise
    if name.endswith("layer_scalar"):
        return 1.0 + 0.1 * noise
    if name.endswith(("bias", "std_bias")):
        return 0.2 * noise
    if "norm" in name or "ln" in name.rsplit(".", 2)[-2] or name.endswith(("std_scale", "scale")):
        is_shifted = adds_one and ("language_model" in name or "soft_emb" in name)
        return 1 + 0.2 * noise - float(is_shifted)
    if "position" in name or "pos_embedding" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise * old.shape[-1] ** -0.5
    fan_in = noise[0].numel() if "patch" in name and noise.ndim == 4 else noise.shape[-1]
    if name.endswith("mm_input_projection_weight"):
        fan_in = noise.shape[0]
    return noise * (2.4 if "lm_head" in name else 1.0) / fan_in**0.5


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as the model takes it: its resized pixels [height, width, 3]."""

    levels: npt.NDArray[np.uint8]


def given(model: Any, shape: str, pictures: list[Picture], token_ids: list[int]) -> dict[str, Any]:
    """What transformers' model takes beside token ids: pixel values, and which tokens are an
    image's. Pixels are as in `tests/oracle/test_gemma_images.py`, which holds them to its
    processors'."""
    import torch

    if not pictures:
        return {}
    values = [each.levels.astype(np.float32) / np.float32(255) for each in pictures]
    vision = named_shape(shape).vision
    assert vision is not None
    of_image = torch.tensor([[int(each == vision.image_token_id) for each in token_ids]])
    if "gemma4" in shape:
        size = 12 if "unified" in shape else 4
        patches, places = zip(*[_patches(each, size) for each in values], strict=True)
        return {
            "pixel_values": _padded(patches, 0.0),
            "image_position_ids": _padded(places, -1),
            "mm_token_type_ids": of_image,
        }
    processor: Any = vision.processor
    mean, std = (
        np.array(each, np.float32)
        for each in (processor.normalisation.mean, processor.normalisation.std)
    )
    normed = [((each - mean) / std).transpose(2, 0, 1) for each in values]
    if "gemma3" in shape:
        return {"pixel_values": torch.tensor(np.stack(normed)), "token_type_ids": of_image}
    sizes = torch.tensor([each.shape[1:] for each in normed])
    height, width = sizes.max(dim=0).values.tolist()
    padded = [
        np.pad(each, ((0, 0), (0, height - each.shape[1]), (0, width - each.shape[2])))
        for each in normed
    ]
    return {"pixel_values": torch.tensor(np.stack(padded)), "image_sizes": sizes}


def _patches(image: Float32Array, size: int) -> tuple[Float32Array, npt.NDArray[np.int64]]:
    rows, columns = image.shape[0] // size, image.shape[1] // size
    split = image.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    row, column = np.divmod(np.arange(rows * columns), columns)
    return split.reshape(rows * columns, -1), np.stack([column, row], axis=1)


def _padded(parts: Any, fill: float) -> Any:
    """Stacked; Gemma 4's tower takes a whole number of its tokens."""
    import torch

    most = max(len(each) for each in parts)
    most = -(-most // 9) * 9
    rows = [np.pad(each, ((0, most - len(each)), (0, 0)), constant_values=fill) for each in parts]
    return torch.tensor(np.stack(rows))


@dataclass(frozen=True, slots=True)
class Theirs:
    """What transformers computes: the prompt with greedy tokens, and logits [T, V] of all but the
    last."""

    token_ids: list[int]
    logits: Float32Array


def embed(model: Any, shape: str, picture: Picture) -> Float32Array:
    """The rows of an image: [tokens, E]."""
    import torch

    own = given(model, shape, [picture], [])
    names = ("pixel_values", "image_position_ids", "image_sizes")
    with torch.inference_mode():
        found = model.model.get_image_features(
            **{name: own[name] for name in names if name in own}, return_dict=True
        ).pooler_output
    rows = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return rows.reshape(-1, rows.shape[-1]).float().numpy()


def _logits(model: Any, shape: str, token_ids: list[int], pictures: list[Picture]) -> Any:
    """[T, V]; with the masks of `generate`, which the unified model's `forward` has otherwise."""
    import torch

    ids, own = torch.tensor([token_ids]), given(model, shape, pictures, token_ids)
    if "unified" in shape and pictures:
        positions = torch.arange(len(token_ids))[None]
        own["attention_mask"] = model.create_masks_for_generate(
            config=model.config,
            inputs_embeds=model.get_input_embeddings()(ids),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
            mm_token_type_ids=own["mm_token_type_ids"],
        )
        own["position_ids"] = positions
    return model(input_ids=ids, **own, use_cache=False).logits[0]


def decode_greedily(
    model: Any, shape: str, prompt: list[int], pictures: list[Picture], num_tokens: int
) -> Theirs:
    """Each token from the whole sequence anew, without a cache."""
    import torch

    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            token_ids.append(int(_logits(model, shape, token_ids, pictures)[-1].argmax()))
        logits = _logits(model, shape, token_ids[:-1], pictures)
    return Theirs(token_ids, logits.float().numpy())
