"""Writes runs' weights as the bundled checkpoints, in Hugging Face layout and bfloat16.

The MTP layer is a file of its own beside the model, `mtp.safetensors`: engines that do not
know such layers refuse a `model.safetensors` with more tensors than the model's.  Files are
replaced atomically, so readers never see an incomplete one.

Run as `python -m training.export` from the root of the repository, with the folders of the
runs to export: `--run` of the model, `--mtp` of its MTP layer, `--draft` of the draft model.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from training.corpus.example import END_OF_TEXT, TURN_END
from training.distill import check_target, load_target
from training.exported import MODULES
from training.model import DRAFT_SHAPE, ModelShape, Weights
from training.mtp import init_mtp
from training.tokenizer import BUNDLED, load_tokenizer
from training.train import RUN_FOLDER, load_saved, load_weights

BUNDLED_DRAFT = BUNDLED.parent / "bundled-draft"
CONFIG_FILE, MTP_FILE = "config.json", "mtp.safetensors"


def export(weights: Weights, shape: ModelShape, folder: Path) -> None:
    """Writes a model without an MTP layer; one that is there was another model's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", dict(_named_tensors(weights, shape)))
    write_object(folder / CONFIG_FILE, _config(shape))
    write_object(folder / "generation_config.json", _generation_config())
    (folder / MTP_FILE).unlink(missing_ok=True)


def export_mtp(weights: Weights, folder: Path) -> None:
    """Writes the MTP layer of the model in `folder`."""
    write_tensors(folder / MTP_FILE, dict(_mtp_tensors(weights)))
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    write_object(folder / CONFIG_FILE, config | {"mtp_num_hidden_layers": 1})


def _named_tensors(weights: Weights, shape: ModelShape) -> Iterator[tuple[str, np.ndarray]]:
    yield "model.embed_tokens.weight", _shipped(weights["embed"].T)
    for index in range(shape.num_hidden_layers):
        for name, module in MODULES.items():
            yield f"model.layers.{index}.{module}.weight", _shipped(weights["layers"][name][index])
    yield "model.norm.weight", _shipped(weights["norm"])


def _mtp_tensors(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    yield "mtp.fc.weight", _shipped(weights["input_proj"])
    yield "mtp.pre_fc_norm_embedding.weight", _shipped(weights["embedding_norm"])
    yield "mtp.pre_fc_norm_hidden.weight", _shipped(weights["hidden_norm"])
    for name, module in MODULES.items():
        yield f"mtp.layers.0.{module}.weight", _shipped(weights["layers"][name][0])
    yield "mtp.norm.weight", _shipped(weights["norm"])


def _shipped(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array).T.astype(ml_dtypes.bfloat16))


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, path)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": _token_id(TURN_END),
        "pad_token_id": _token_id(END_OF_TEXT),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "eos_token_id": [_token_id(TURN_END), _token_id(END_OF_TEXT)],
        "pad_token_id": _token_id(END_OF_TEXT),
        "do_sample": False,
    }


def _token_id(token: str) -> int:
    token_id = load_tokenizer().token_to_id(token)
    assert token_id is not None
    return token_id


def write_object(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    arguments = _parse_arguments()
    folder: Path = arguments.folder
    run = arguments.run
    if run is None and arguments.mtp is None and arguments.draft is None:
        run = RUN_FOLDER
    shape = ModelShape()
    if run is not None:
        export(load_weights(run, shape), shape, folder)
    if arguments.mtp is not None:
        target = load_target(folder, None)
        check_target(arguments.mtp, target)
        export_mtp(load_saved(arguments.mtp, init_mtp(target, jax.random.key(0))), folder)
    if arguments.draft is not None:
        export(load_weights(arguments.draft, DRAFT_SHAPE), DRAFT_SHAPE, arguments.draft_folder)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", type=Path, help="of the model (default: training/checkpoints if no run is given)"
    )
    parser.add_argument("--mtp", type=Path, help="run of the MTP layer of the model in --folder")
    parser.add_argument("--draft", type=Path, help="run of the draft model")
    parser.add_argument("--folder", type=Path, default=BUNDLED)
    parser.add_argument("--draft-folder", type=Path, default=BUNDLED_DRAFT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
