"""A GGUF file through every face: the same tokens as from the folder that it was made of."""

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
from cadenza.frontend.loaded_model import open_text
from cadenza.loading.build import find_checkpoint, plan_model
from cadenza.outputs import RequestOutput
from cadenza.server.openai.chat import ChatRequest
from cadenza.verification.run import QUANTISED_TOLERANCE, VerifyOptions, verify
from tests.by_day import by_day
from tests.checkpoint.gguf_models import ARCHITECTURES, convert, convert_config, tiny_config
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.test_float8_weights import CASES
from tests.faces.test_verification import SMALL, ignore
from tests.tools.gguf_files import BYTE_LEVEL, TEMPLATE

PROMPTS = [[5, 9, 300, 17, 4, 4, 120], list(range(3, 60)), [7]]
OPTIONS = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 22,
}
SEEDED = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 3}


def generate(model: Path) -> list[RequestOutput]:
    with LLM(model, **OPTIONS) as llm:
        return llm.generate(PROMPTS, SamplingParams(**SEEDED))


@pytest.mark.native
@pytest.mark.parametrize("shape", by_day(["granite", "gemma3", "mixtral"], {"gemma3"}))
def test_the_outputs_are_the_folders_bit_for_bit(tmp_path: Path, shape: str):
    """Paired rows, summed norms and stacked experts; log probabilities show any other bit."""
    model = convert(shape, tmp_path / "original", dtype="bfloat16")
    ours = generate(model.write(tmp_path / "model.gguf"))
    theirs = generate(model.original)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.native
@pytest.mark.soak
@pytest.mark.parametrize("shape", ["llama", "phi3"])
def test_the_tokens_are_the_folders_where_the_rope_has_factors(tmp_path: Path, shape: str):
    """The file has them as float32, the folder as what they are computed from."""
    model = convert(shape, tmp_path / "original")
    ours = generate(model.write(tmp_path / "model.gguf"))
    theirs = generate(model.original)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GGUF file that has a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("gguf")
    model = convert("qwen3", folder / "original")
    model.others |= {f"tokenizer.ggml.{key}": value for key, value in BYTE_LEVEL.items()}
    model.others["tokenizer.chat_template"] = TEMPLATE
    (folder / "served").mkdir()
    model.write(folder / "served" / "tiny.gguf")
    return folder / "served"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    status = main([*map(str, arguments)])
    assert status == 0
    return capsys.readouterr().out


def test_a_folder_with_one_file_is_the_file(folder: Path):
    assert find_checkpoint(folder).digest == find_checkpoint(folder / "tiny.gguf").digest


def test_info_shows_a_files_facts(folder: Path, capsys: pytest.CaptureFixture[str]):
    facts = json.loads(run(capsys, "info", folder / "tiny.gguf", "--json"))
    size = (folder / "tiny.gguf").stat().st_size
    assert facts["model"]["format"] == "gguf"
    assert facts["model"]["files"] == {"tiny.gguf": size}
    assert facts["model"]["family"] == "qwen3"
    assert facts["text"]["tokenizer"] == "tiny.gguf"
    assert facts["text"]["tokenizer_vocab_size"] == len(BYTE_LEVEL["tokens"])
    assert facts["text"]["has_chat_template"] is True
    assert facts["text"]["generation_defaults"] == LLAMA_CPP
    assert facts["text"]["assumed_defaults"] == [*LLAMA_CPP]


def test_llm_takes_texts_and_conversations(folder: Path):
    with LLM(str(folder / "tiny.gguf"), **OPTIONS) as llm:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        (plain,) = llm.generate(["ab 12"], params)
        (chat,) = llm.chat([[{"role": "user", "content": "ab 12"}]], params)
    tokens = BYTE_LEVEL["tokens"]
    assert [tokens[token_id] for token_id in plain.prompt_token_ids] == ["ab", "Ġ", "1", "2"]
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_a_file_without_recommendations_is_sampled_as_in_llama_cpp_where_nothing_is_said(
    folder: Path,
):
    told = {"seed": 5, "max_tokens": 12, "ignore_eos": True}
    with LLM(folder, **OPTIONS) as llm:
        assert llm.default_sampling_params == SamplingParams(**LLAMA_CPP)
        plain, partly, greedy, own = llm.generate(
            [[5, 9]] * 4,
            [
                told,
                {**told, "temperature": 3.0},
                {**told, "temperature": 0},
                SamplingParams(**told),
            ],
        )
        asked = [
            SamplingParams(**told, **{**LLAMA_CPP, **changes})
            for changes in ({}, {"temperature": 3.0}, {"temperature": 0.0})
        ]
        expected = llm.generate([[5, 9]] * 3, asked)
    found = [each.outputs[0].token_ids for each in (plain, partly, greedy, own)]
    assert found[:3] == [each.outputs[0].token_ids for each in expected]
    with LLM(folder, **OPTIONS, generation_config="none") as neutral:
        assert neutral.default_sampling_params == SamplingParams()
        (drawn,) = neutral.generate([[5, 9]], told)
    assert drawn.outputs[0].token_ids == found[3] != found[0]


def test_a_receipt_has_the_sampling_that_was_assumed_and_the_fingerprint_differs_without(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ("--max-num-seqs", "4", "--max-model-len", "128", "--max-num-batched-tokens", "64")
    file = tmp_path / "receipt.json"
    asked = ("generate", "--model", folder, "ab 12", "--max-tokens", "3", "--receipt", file)
    run(capsys, *asked, *flags)
    receipt = json.loads(file.read_text())
    assert {name: receipt["params"][name] for name in LLAMA_CPP} == LLAMA_CPP
    assert "equal, 3 tokens" in run(capsys, "replay", file, "--model", folder)
    told = ("info", folder, "--json", *flags)
    digests = [
        json.loads(run(capsys, *told, "--generation-config", kind))["answers"]["defaults"]
        for kind in ("auto", "none")
    ]
    assert digests[0] == receipt["fingerprint"]["defaults"] != digests[1]


@pytest.mark.parametrize(("kind", "expected"), [("auto", LLAMA_CPP), ("none", {})])
def test_a_server_samples_a_file_as_in_llama_cpp_unless_it_is_asked_not_to(
    folder: Path, kind: str, expected: dict[str, float]
):
    config = EngineConfig(generation_config=kind)  # type: ignore[arg-type]
    text = open_text(find_checkpoint(folder), config)
    body = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
    for changes in ({}, {"temperature": 0.25}, {"top_k": 3, "min_p": 0.5}):
        request = ChatRequest.read(json.dumps({**body, **changes}).encode())
        own = SamplingParams(max_tokens=None, **{**expected, **changes})
        assert request.sampling(text) == own


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


@pytest.mark.native
@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "shape"),
    [("fp8 in blocks", "tiny-qwen3"), ("compressed-tensors, channel", "tiny-qwen3-moe")],
)
def test_the_gate_holds_float8_streams_to_the_exact_reference(
    tmp_path: Path, case: str, shape: str
):
    settings, writer = CASES[case]
    folder = write_quantised(tmp_path, shape, settings, writer)
    result, _ = verify(replace(SMALL, shape=None, model=str(folder)), ignore)
    assert result.last_line.startswith("REFERENCE-EXACT PASS bitwise requests=8 modes=7 ")
    assert result.reference_difference is None, "activations are not rounded"


def test_info_names_float8_weights_and_their_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings, writer = CASES["fp8, static"]
    folder = write_quantised(tmp_path, "tiny-qwen3", settings, writer)
    assert main(["info", str(folder)]) == 0
    text = capsys.readouterr().out
    for line in (
        "stored_quantization +fp8 .e4m3.",
        "stated_activations +float8 with one scale for each linear",
        "\\bactivations +(bfloat16|float32)",
        "float8_e4m3",
    ):
        assert re.search(line, text), text
