"""The GGUF files that llama.cpp is measured with: they are the checkpoint, or have its shape."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals.as_gguf import main
from cadenza.bench.checkpoints import make_checkpoint, random_weights
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from tests.checkpoint.config_writer import format_model_config

TINY = named_shape("tiny-qwen3-moe")
assert TINY.experts is not None
MIXTURE = replace(
    TINY,
    vocab_size=1000,
    hidden_size=256,
    num_layers=3,
    layer_pattern=TINY.layer_pattern[:1],
    experts=replace(TINY.experts, intermediate_size=64),
)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(format_model_config(MIXTURE)))
    return file


def test_a_checkpoint_of_experts_has_the_same_weights_in_the_file(shape: Path, tmp_path: Path):
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    make_checkpoint(random_weights(str(shape), "bfloat16"), folder, lambda _: None)
    main([str(folder), str(file), "BF16"])
    ours, original = open_checkpoint(file), open_checkpoint(folder)
    assert ours.config.experts == original.config.experts
    assert set(ours.weights) == set(original.weights)
    for name in original.weights:
        found, expected = ours.weights.array(name), original.weights.array(name)
        assert np.array_equal(found.astype(np.float32), expected.astype(np.float32)), name


def test_random_codes_of_a_shape_have_the_types_of_llama_quantize_and_the_spread_of_its_weights(
    shape: Path, tmp_path: Path
):
    file = tmp_path / "model.gguf"
    main([str(shape), str(file), "Q4_K_M", "--layers", "2"])
    found = open_checkpoint(file)
    assert found.config.num_layers == 2
    types = {name: found.weights.stored_type(name) for name in found.weights}
    expert = "mlp.experts.7"
    assert types["lm_head.weight"] == "Q6_K"
    assert types["model.embed_tokens.weight"] == "Q4_K"
    assert types["model.layers.0.mlp.gate.weight"] == "float32"
    assert types[f"model.layers.0.{expert}.gate_proj.weight"] == "Q4_K"
    assert types["model.layers.0.self_attn.v_proj.weight"] == "Q4_K"
    assert types["model.layers.1.self_attn.v_proj.weight"] == "Q6_K"
    assert types[f"model.layers.1.{expert}.down_proj.weight"] == "Q8_0"  # no multiple of 256
    for name in ("lm_head.weight", f"model.layers.0.{expert}.up_proj.weight"):
        values = found.weights.array(name).astype(np.float32)
        deviation = 256**-0.5 * (np.log(1000) ** 0.5 if name == "lm_head.weight" else 1.0)
        assert abs(values.std() / deviation - 1.0) < 0.05
        assert abs(values.mean()) < 0.05 * deviation


def test_q4_k_m_of_a_folders_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path), "out.gguf", "Q4_K_M"])
    assert "llama-quantize" in capsys.readouterr().err
