"""mlx-lm's models are loaded without its package's side effects and without a checkpoint's code."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.mlx.zoo import settings_for_mlx_lm
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.by_day import by_day
from tests.mlx.tiny_models import KINDS, QUICK_KINDS

GENERATE = """
import resource, sys
before = resource.getrlimit(resource.RLIMIT_NOFILE)
from cadenza import LLM, SamplingParams
llm = LLM(backend="mlx", max_num_seqs=2, max_model_len=64)
params = SamplingParams(temperature=0.0, max_tokens=4)
print(llm.generate(["The capital of France is"], params)[0].outputs[0].text)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
print(*sys.modules)
"""


def test_generating_imports_neither_jax_nor_transformers_nor_mlx_lms_package():
    """The program leaves the model open, and ends without an error all the same."""
    ran = subprocess.run(
        [sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True, timeout=120
    )
    answer, _, names = ran.stdout.rstrip().rpartition("\n")
    loaded = set(names.split())
    assert "Paris" in answer
    assert {"mlx.core", "cadenza.backends.mlx.runner"} <= loaded
    assert not {"jax", "jaxlib", "transformers", "torch", "mlx_lm", "cadenza.backends.xla"} & loaded


def changed_copy(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_model_file_of_the_checkpoint_is_refused_and_never_runs(
    tiny_model: Callable[[str], Path], tmp_path: Path
):
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = changed_copy(tiny_model("full"), tmp_path / "own", model_file="own.py")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="model_file is set; code from a checkpoint"):
        load_zoo_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"model_type": name}, "which mlx-lm does not have")
            for name in ("nothing", "../utils", "base.x", "json", "", "__init__", None, 3)
        ),
        ({"model_type": "cache"}, "mlx-lm cannot load the model"),
        ({"num_hidden_layers": 2}, "mlx-lm cannot load the model"),
    ],
    ids=repr,
)
def test_a_model_that_mlx_lm_cannot_load_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, changes: dict[str, object], reason: str
):
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = changed_copy(tiny_model("full"), tmp_path / "changed", **changes)
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=reason):
        load_zoo_model(folder)
    assert not {each for each in sys.modules if each.startswith("mlx_lm")} - before


@pytest.mark.parametrize("kind", by_day(KINDS, QUICK_KINDS))
def test_a_model_of_any_family_opens_where_the_backend_has_its_code(
    tiny_model: Callable[[str], Path], kind: str
):
    checkpoint = open_checkpoint(tiny_model(kind), any_family=True)
    assert checkpoint.outline.vocab_size == KINDS[kind].config["vocab_size"]
    assert checkpoint.outline.dtype == "float32"
    if not checkpoint.is_known:
        with pytest.raises(CheckpointError):
            open_checkpoint(tiny_model(kind))
        with pytest.raises(CheckpointError):
            _ = checkpoint.config


@pytest.mark.parametrize("kind", by_day(KINDS, QUICK_KINDS))
def test_the_measured_memory_is_that_of_the_loaded_model(
    tiny_model: Callable[[str], Path], kind: str
):
    import mlx.core as mx

    from cadenza.backends.mlx.probe import measure_model
    from cadenza.backends.mlx.slot_model import SlotModel
    from cadenza.backends.mlx.slots import SlotSizes
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = tiny_model(kind)
    measured = measure_model(folder, 131, ("float32", "bfloat16"))
    stated = measured.memory
    loaded = load_zoo_model(folder)
    slots = SlotModel(loaded.model, loaded.new_caches(), SlotSizes(num_slots=3, capacity=50), (16,))
    slots.compute(0, 0, mx.array([1, 2, 3]))
    assert measured.depends_on_cuts == (KINDS[kind].slot_unit > 1)
    held = sum(each.nbytes for each in slots.arrays())
    memory = stated["float32"]
    logits = 6 * 131 * 4
    assert 3 * (memory.row_bytes - logits + 34 * memory.kv_bytes_per_token) == held
    assert stated["bfloat16"].weight_bytes < memory.weight_bytes
    assert memory.weight_bytes >= (folder / "model.safetensors").stat().st_size * 0.95 - 8192


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0}
FULL = {"rope_type": "proportional", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama", "rope_theta": 7.0, "rope_scaling": {"type": "linear"}}, {}),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"model_type": "llama", "rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}, {}),
        (
            {"model_type": "gpt_oss", "rope_parameters": YARN},
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": FULL,
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"type": "proportional", **FULL},
            },
        ),
        (
            {
                "model_type": "gemma3_text",
                "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            },
            {"sliding_window_pattern": 3},
        ),
        ({"model_type": "qwen3_5_moe_text"}, {"model_type": "qwen3_5_moe"}),
        (
            {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            {"model_type": "qwen3_5", "full_attention_interval": 2},
        ),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]},
            {"first_k_dense_replace": 2},
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "layer_types": ["linear_attention", "full_attention", "mamba"],
                "num_local_experts": 0,
                "shared_intermediate_size": 40,
            },
            {
                "layer_types": ["mamba", "attention", "mamba"],
                "intermediate_size": 40,
                "position_embedding_type": "nope",
                "time_step_limit": [0.0, math.inf],
            },
        ),
        (
            {"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 5, "conv_bias": True},
            {
                "block_dim": 64,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
                "norm_eps": 1e-5,
            },
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_mlx_lm_needs_are_added_and_others_stay(
    config: dict[str, Any], changes: dict[str, Any]
):
    assert settings_for_mlx_lm(config) == changes


def test_a_magnitude_of_yarn_is_given_as_the_scale_that_mlx_lm_reads():
    parameters = {**YARN, "attention_factor": 1.5}
    changes = settings_for_mlx_lm({"model_type": "ministral3", "rope_parameters": parameters})
    scaling = changes["rope_parameters"]
    assert changes["rope_scaling"] == {"type": "yarn", **scaling}
    assert 0.1 * scaling["mscale"] * math.log(16.0) + 1 == pytest.approx(1.5)
    assert scaling["mscale_all_dim"] == 0
    assert "mscale" not in parameters


def test_a_text_models_settings_are_changed_within_those_of_its_wrapper():
    inner = {"model_type": "gemma4_unified_text", "vocab_size": 40}
    config = {"model_type": "gemma4_unified", "text_config": inner, "tie_word_embeddings": False}
    assert settings_for_mlx_lm(config) == {
        "vocab_size": 40,
        "text_config": {
            **inner,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
        },
    }
