"""Writes a run's weights as `models/bundled-vision`, in Hugging Face layout and bfloat16.

Run as `python -m training.vision.export` from the root of the repository.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from training.corpus.example import END_OF_TEXT, TURN_END
from training.export import write_object, write_tensors
from training.train import load_saved
from training.vision.dialogues import IMAGE
from training.vision.exported import named_tensors
from training.vision.model import SEEING_PARTS, init_seeing
from training.vision.scenes import SIDE
from training.vision.shape import (
    CELLS_OF_A_SIDE,
    PATCH,
    SCALE,
    TEXT_SHAPE,
    TowerShape,
)
from training.vision.tokenizer import BUNDLED_VISION, load_vision_tokenizer
from training.vision.train import VISION_RUN_FOLDER


def export_seeing(tower: Path, text: Path, folder: Path) -> None:
    """Exports the tower of one run with the text model of another."""
    start = init_seeing(TEXT_SHAPE, TowerShape(), jax.random.key(0))
    parts = {name: start[name] for name in SEEING_PARTS}
    weights = load_saved(tower, parts) | load_saved(text, {"text": start["text"]})
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", named_tensors(weights, TEXT_SHAPE, TowerShape()))
    write_object(folder / "config.json", _config())
    write_object(folder / "generation_config.json", _generation_config())
    write_object(folder / "preprocessor_config.json", _image_processor())
    write_object(
        folder / "processor_config.json",
        {"image_seq_len": CELLS_OF_A_SIDE**2, "processor_class": "SmolVLMProcessor"},
    )


def _token_id(token: str) -> int:
    token_id = load_vision_tokenizer().token_to_id(token)
    assert token_id is not None
    return token_id


def _config() -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": _token_id(IMAGE),
        "scale_factor": SCALE,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "text_config": _text_config(),
        "vision_config": _vision_config(),
    }


def _text_config() -> dict[str, Any]:
    shape = TEXT_SHAPE
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": _token_id(TURN_END),
        "pad_token_id": _token_id(END_OF_TEXT),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }


def _vision_config() -> dict[str, Any]:
    shape = TowerShape()
    return {
        "model_type": "smolvlm_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden_size,
        "image_size": SIDE,
        "intermediate_size": shape.intermediate_size,
        "layer_norm_eps": shape.layer_norm_eps,
        "num_attention_heads": shape.num_attention_heads,
        "num_channels": 3,
        "num_hidden_layers": shape.num_hidden_layers,
        "patch_size": PATCH,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "eos_token_id": [_token_id(TURN_END), _token_id(END_OF_TEXT)],
        "pad_token_id": _token_id(END_OF_TEXT),
        "do_sample": False,
    }


def _image_processor() -> dict[str, Any]:
    """Squeezes every image to one part; `resample` 1 is Lanczos."""
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": SIDE},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": SIDE},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tower", type=Path, default=VISION_RUN_FOLDER / "tower")
    parser.add_argument("--text", type=Path, default=VISION_RUN_FOLDER / "text")
    parser.add_argument("--folder", type=Path, default=BUNDLED_VISION)
    arguments = parser.parse_args()
    export_seeing(arguments.tower, arguments.text, arguments.folder)


if __name__ == "__main__":
    main()
