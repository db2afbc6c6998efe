"""GGUF files of Gemma 4 as llama.cpp's converter writes them: their config and weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cadenza.checkpoint import ModelConfig, named_shape, open_checkpoint, write_random_checkpoint
from cadenza.checkpoint.rope_config import ProportionalRopeScaling
from cadenza.checkpoint.weights import open_weights
from cadenza.errors import CheckpointError
from tests.checkpoint.gguf_models import Arrays, Conversion

SHAPES = ("tiny-gemma4", "tiny-gemma4-moe", "tiny-gemma4-unified")
OTHER_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Conversion]:
    def convert(shape: str = "tiny-gemma4") -> Conversion:
        config, folder = named_shape(shape), tmp_path / "original"
        write_random_checkpoint(config, folder, seed=5, dtype="float32")
        weights = open_weights(folder)
        arrays = {name: np.asarray(weights[name]).astype(np.float32) for name in weights}
        return Conversion(
            architecture="gemma4",
            metadata=describe(config),
            tensors=rename(config, stack_experts(arrays)) | rope_factors(config),
            original=folder,
        )

    return convert


def describe(config: ModelConfig) -> dict[str, Any]:
    kinds = config.layer_kinds
    window_kind = next(kind for kind in kinds if kind.window is not None)
    sliding, full = config.heads_of(window_kind), config.heads_of(kinds[-1])
    counts = [config.heads_of(kind).num_kv_heads for kind in kinds]
    widths = [kind.intermediate_size or config.intermediate_size for kind in kinds]
    assert config.window_rope is not None
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": counts if len(set(counts)) > 1 else counts[0],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": window_kind.window,
        "attention.sliding_window_pattern": [kind.window is not None for kind in kinds],
        "attention.shared_kv_layers": sum(kind.kv_source is not None for kind in kinds),
        "embedding_length_per_layer_input": config.layer_inputs.size if config.layer_inputs else 0,
        "rope.freq_base": config.rope.theta,
        "rope.freq_base_swa": config.window_rope.theta,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    if config.experts is not None:
        values["expert_count"] = config.experts.num_experts
        values["expert_used_count"] = config.experts.num_chosen
        values["expert_feed_forward_length"] = config.experts.intermediate_size
    return values


def stack_experts(arrays: Arrays) -> Arrays:
    """The two tensors of a layer's experts, as the model's folder has them."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        before, _, after = name.partition(".experts.")
        merged = f"{before}.experts.{after.split('.')[1]}.weight" if after else name
        parts.setdefault(merged, []).append(array)
    found = {
        name: np.stack(each) if ".experts." in name else each[0] for name, each in parts.items()
    }
    for name in [name for name in found if name.endswith("experts.gate_proj.weight")]:
        before = name.removesuffix("gate_proj.weight")
        both = [found.pop(f"{before}{part}_proj.weight") for part in ("gate", "up")]
        found[f"{before}gate_up_proj.weight"] = np.concatenate(both, axis=1)
    return found


def rename(config: ModelConfig, arrays: Arrays) -> Arrays:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_layers)
    renamed: Arrays = {}
    for name, array in arrays.items():
        other = OTHER_NAMES.get(name.split(".", 3)[-1])
        found = table.get_name(name, try_suffixes=(".weight",))
        renamed[f"blk.{name.split('.')[2]}.{other}" if other else str(found)] = array
    assert "None" not in renamed
    return renamed


def rope_factors(config: ModelConfig) -> Arrays:
    scaling = config.rope.scaling
    assert isinstance(scaling, ProportionalRopeScaling)
    still = config.rope.rotary_dim // 2 - scaling.num_pairs
    values = [1.0] * scaling.num_pairs + [1e30] * still
    return {"rope_freqs.weight": np.array(values, np.float32)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_models_config_and_weights_are_those_of_its_folder(
    make: Callable[..., Conversion], tmp_path: Path, shape: str
):
    model = make(shape)
    found = open_checkpoint(model.write(tmp_path / "model.gguf"))
    original = open_checkpoint(model.original)
    assert set(found.weights) == set(original.weights)
    for name in original.weights:
        assert np.array_equal(found.weights[name], original.weights[name]), name
    ours, theirs = found.config, original.config
    for field in ("layer_kinds", "rope", "window_rope", "experts", "layer_inputs", "heads"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.logit_soft_cap == theirs.logit_soft_cap
    assert ours.attention_scale == theirs.attention_scale == 1.0


def test_keys_of_layers_that_read_those_of_others_are_left_out(
    make: Callable[..., Conversion], tmp_path: Path
):
    model = make()
    for name in ("attn_k", "attn_v", "attn_k_norm"):
        model.tensors[f"blk.4.{name}.weight"] = model.tensors[f"blk.2.{name}.weight"]
    found = open_checkpoint(model.write(tmp_path / "model.gguf"))
    assert "model.layers.4.self_attn.k_proj.weight" not in found.weights


def test_a_rope_that_turns_other_pairs_is_refused(make: Callable[..., Conversion], tmp_path: Path):
    model = make()
    model.tensors["rope_freqs.weight"][1] = 2.0
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_checkpoint(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_length", [88, 88, 88, 176, 88]),
        ("attention.value_length_swa", 32),
        ("attention.sliding_window_pattern", [True] * 3),
    ],
)
def test_metadata_of_layers_that_are_not_gemma_4s_are_refused(
    make: Callable[..., Conversion], tmp_path: Path, key: str, value: Any
):
    model = make()
    model.metadata[key] = value
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(model.write(tmp_path / "model.gguf"))
