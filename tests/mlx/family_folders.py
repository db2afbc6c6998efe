"""Tiny random checkpoints of newer families, laid out as the published ones are."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.test_interleaved_experts import dtype_of, in_mxfp4, write

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFolder:
    """A shape and its published layout.

    Args:
        num_layers: the first layers that remain, if not all.
        changes: settings other than the shape's; None removes one.
        wrapper: `model_type` of the model with towers around it.
        stacked: whether the experts of a layer are one tensor: by its names for gate and up, and
            for down.
        is_mxfp4: whether the experts are.
    """

    shape: str
    num_layers: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrapper: str | None = None
    stacked: tuple[str, str] | None = None
    is_mxfp4: bool = False


_GATE_UP = "experts.gate_up_proj", "experts.down_proj"

FAMILIES: Mapping[str, FamilyFolder] = {
    "qwen3.5": FamilyFolder(shape="tiny-qwen3.5", wrapper="qwen3_5"),
    "qwen3.5-text": FamilyFolder(shape="tiny-qwen3.5"),
    "qwen3.5-moe": FamilyFolder(
        shape="tiny-qwen3.5-moe", num_layers=3, wrapper="qwen3_5_moe", stacked=_GATE_UP
    ),
    "gemma4": FamilyFolder(shape="tiny-gemma4", wrapper="gemma4"),
    "gemma4-unified": FamilyFolder(shape="tiny-gemma4-unified", wrapper="gemma4_unified"),
    "gemma4-unified-text": FamilyFolder(shape="tiny-gemma4-unified"),
    "gemma4-moe": FamilyFolder(shape="tiny-gemma4-moe", stacked=_GATE_UP),
    # mlx-lm 0.32.2 does not read `truncate`.
    "gpt-oss": FamilyFolder(shape="tiny-gpt-oss", changes={"truncate": True}, is_mxfp4=True),
    "ministral3": FamilyFolder(shape="tiny-ministral3"),
    "devstral": FamilyFolder(shape="tiny-ministral3", wrapper="mistral3"),
    "lfm2": FamilyFolder(shape="tiny-lfm2"),
    "granite4-moe": FamilyFolder(
        shape="tiny-granite4-moe", stacked=("input_linear.weight", "output_linear.weight")
    ),
    "deepseek-v3": FamilyFolder(shape="tiny-deepseek-v3"),
    "glm4-moe-lite": FamilyFolder(shape="tiny-glm4-moe-lite", num_layers=3),
}


def write_family(family: FamilyFolder, folder: Path, *, seed: int = 2) -> Path:
    plain = folder.with_name(f"{folder.name}-plain")
    write_random_checkpoint(named_shape(family.shape), plain, seed=seed, dtype="float32")
    config = json.loads((plain / "config.json").read_text())
    weights = open_weights(plain)
    tensors = {name: np.array(weights[name]) for name in weights}
    shutil.rmtree(plain)
    if family.num_layers is not None:
        _cut(config, tensors, family.num_layers)
    target = config["rope_parameters"] if "truncate" in family.changes else config
    target |= family.changes
    if family.is_mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
        tensors, _ = in_mxfp4(tensors, seed)
    if family.stacked is not None:
        tensors = _stacked(tensors, *family.stacked)
    if family.wrapper is not None:
        config, tensors = _wrapped(config, tensors, family.wrapper)
    assert {dtype_of(each) for each in tensors.values()} <= {"float32", "uint8"}
    return write(folder, config, tensors)


def _cut(config: dict[str, Any], tensors: Arrays, num_layers: int) -> None:
    for layer in range(num_layers, config["num_hidden_layers"]):
        for name in [each for each in tensors if each.startswith(f"model.layers.{layer}.")]:
            del tensors[name]
    config["num_hidden_layers"] = num_layers
    for key in ("layer_types", "mlp_layer_types"):
        if key in config:
            config[key] = config[key][:num_layers]


def _stacked(tensors: Arrays, gate_up: str, down: str) -> Arrays:
    stacked: Arrays = {}
    experts: dict[str, dict[int, Arrays]] = {}
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            stacked[name] = tensor
            continue
        index, part, _ = rest.split(".")
        experts.setdefault(prefix, {}).setdefault(int(index), {})[part] = tensor
    for prefix, layer in experts.items():
        parts = [layer[index] for index in sorted(layer)]
        both = [np.concatenate([each["gate_proj"], each["up_proj"]]) for each in parts]
        stacked[f"{prefix}.{gate_up}"] = np.stack(both)
        stacked[f"{prefix}.{down}"] = np.stack([each["down_proj"] for each in parts])
    return stacked


def _wrapped(
    config: dict[str, Any], tensors: Arrays, model_type: str
) -> tuple[dict[str, Any], Arrays]:
    inner = {key: value for key, value in config.items() if key != "architectures"}
    outer: dict[str, Any] = {
        "model_type": model_type,
        "text_config": inner,
        "tie_word_embeddings": inner["tie_word_embeddings"],
        "dtype": "float32",
    }
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}"
        if name.startswith("model.")
        else name: tensor
        for name, tensor in tensors.items()
    }
    tower = "model.visual" if model_type.startswith("qwen") else "model.vision_tower"
    return outer, renamed | {f"{tower}.patch.weight": np.zeros((4, 4), np.float32)}
