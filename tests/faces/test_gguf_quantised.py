"""GGUF files with quantised weights, computed from their own codes: nothing is dequantised."""

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cadenza import LLM, SamplingParams
from cadenza.backends.xla.decoder import load_decoder
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.bench.machine import ModelCost
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.gguf.blocks import ENCODINGS
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.tensor_formats import held_formats
from cadenza.cli import main
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.build import plan_model
from cadenza.verification.run import QUANTISED_TOLERANCE, VerifyOptions, verify
from tests.checkpoint.gguf_models import ARCHITECTURES, convert_config, tiny_config

pytestmark = pytest.mark.native

MIXED = {
    "token_embd.weight": "Q6_K",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.ffn_up.weight": "Q5_0",
    "blk.1.attn_k.weight": "F16",
    "blk.1.ffn_down.weight": "Q8_0",
    "blk.1.attn_output.weight": "MXFP4",
}
"""Beside Q4_K: other parts of the operands that are loaded as one."""


def write(
    folder: Path,
    kind: str,
    kinds: dict[str, str],
    *,
    shape: str = "llama",
    width: int = 256,
    num_layers: int = 2,
) -> Path:
    config = replace(
        tiny_config(shape), hidden_size=width, num_heads=width // 64, head_dim=64, num_kv_heads=2
    )
    rope = replace(config.rope, rotary_dim=64)
    config = replace(config, num_layers=num_layers, intermediate_size=512, rope=rope)
    if config.experts is not None:
        experts = replace(config.experts, intermediate_size=256)
        config = replace(config, experts=experts)
    model = convert_config(ARCHITECTURES[shape], config, folder / "original")
    model.kind = kind
    model.kinds = {name: each for name, each in kinds.items() if name in model.tensors}
    return model.write(folder / "model.gguf")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mixed"), "Q4_K", MIXED)


def verify_file(path: Path) -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=300)
    options = VerifyOptions(model=str(path), num_requests=6, max_tokens=12, config=config)
    result, _ = verify(options, lambda _: None)
    assert result.passed, result.last_line
    assert result.reference_difference is not None
    assert 0.0 < result.reference_difference < QUANTISED_TOLERANCE["int8"]


@pytest.mark.soak
def test_the_gate_passes_on_a_file_with_several_types(mixed: Path):
    """Against the float32 reference with the same values: only activations are rounded."""
    verify_file(mixed)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ENCODINGS)
@pytest.mark.parametrize("shape", ["llama", "qwen3-moe", "phi3"])
def test_the_gate_passes_on_a_file_of_each_type(tmp_path: Path, kind: str, shape: str):
    router = {f"blk.{index}.ffn_gate_inp.weight": "F32" for index in range(2)}
    verify_file(write(tmp_path, kind, router, shape=shape))


@pytest.mark.soak
def test_the_experts_of_a_file_are_computed_from_their_codes(tmp_path: Path):
    kinds = {"blk.0.ffn_gate_inp.weight": "F32", "blk.0.ffn_up_exps.weight": "Q5_0"}
    path = write(tmp_path, "Q4_K", kinds, shape="qwen3-moe", num_layers=1)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    found = []
    for ops in ("native", "reference"):
        limits = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16}
        with LLM(path, **limits, ops=ops, dtype="float32") as llm:
            found.append(llm.generate([[5, 9, 300, 17]], params)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids
    ours, theirs = ([next(iter(each.values())).logprob for each in one.logprobs] for one in found)
    assert ours == pytest.approx(theirs, abs=1e-3)


def load(checkpoint: Checkpoint) -> int:
    """Loads the model; the bytes of numpy's memory that it held beyond what it keeps."""
    spec = DecoderSpec(model=checkpoint.config, dtype=jnp.bfloat16, page_size=16)
    ops = NativeOps(spec)
    tracemalloc.start()
    loaded = load_decoder(WeightSource(ops, spec, checkpoint.weights), 64)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.layers
    return peak - kept


def test_loading_makes_no_copy_of_a_tensor(tmp_path: Path):
    """The negative control: with one tensor of floats among q, k and v these are dequantised."""
    (tmp_path / "without").mkdir()
    sound = {name: kind for name, kind in MIXED.items() if kind != "F16"}
    direct = open_checkpoint(write(tmp_path / "without", "Q4_K", sound, width=512))
    most = plan_model(direct, EngineConfig()).weight_bytes // 10
    assert load(direct) < most
    (tmp_path / "with").mkdir()
    decoded = open_checkpoint(write(tmp_path / "with", "Q4_K", MIXED, width=512))
    assert load(decoded) > most


def test_memory_and_bounds_count_the_files_own_formats(mixed: Path):
    checkpoint = open_checkpoint(mixed)
    plan = plan_model(checkpoint, EngineConfig())
    assert "MiB of MXFP4, Q4_K, Q5_0, Q6_K, Q8_0 weights" in plan.summary
    assert 0.9 < plan.weight_bytes / checkpoint.num_weight_bytes < 1.4
    stored = held_formats(checkpoint.config, checkpoint.weights)
    cost = ModelCost.of(checkpoint.config, plan.dtype, stored_format=stored)
    assert 0.9 < (cost.layer_bytes + cost.head_bytes) / plan.weight_bytes <= 1.0
    assert cost.head_bytes == checkpoint.config.vocab_size * 256 * 37 // 64  # 4.625 bits


def test_info_tells_that_activations_are_rounded(mixed: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(mixed), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["stated_activations"] is None
    assert facts["engine"]["dtype"] == "bfloat16"
    assert facts["engine"]["activations"] == "int8 per token and group of 32, 16 bits in one of 64"


@pytest.mark.parametrize("shape", ["llama", "qwen3-moe"])
def test_the_plan_counts_the_bytes_that_are_held(tmp_path: Path, shape: str):
    """Operands of several types too, which are held in a larger format or in floats."""
    router = {f"blk.{index}.ffn_gate_inp.weight": "F32" for index in range(2)}
    kinds = {**MIXED, **router, "blk.1.ffn_up_exps.weight": "Q5_0"}
    checkpoint = open_checkpoint(write(tmp_path, "Q5_K", kinds, shape=shape))
    spec = DecoderSpec(model=checkpoint.config, dtype=jnp.bfloat16, page_size=16)
    held = load_decoder(WeightSource(NativeOps(spec), spec, checkpoint.weights), 64)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    plan = plan_model(checkpoint, EngineConfig(dtype="bfloat16"))
    assert num_bytes == pytest.approx(plan.weight_bytes, rel=0.05)


def test_quantising_a_quantised_file_is_refused_with_both_named(mixed: Path):
    message = re.escape(
        "--quantization int8: the checkpoint is already quantised as MXFP4, Q4_K, Q5_0, Q6_K, Q8_0"
    )
    with pytest.raises(ConfigError, match=message):
        plan_model(open_checkpoint(mixed), EngineConfig(quantization="int8"))
