"""A GGUF file through every face: the same tokens as from the folder that it was made of."""

import json
from pathlib import Path

import pytest

from cadenza import LLM, EngineConfig, SamplingParams
from cadenza.cli import main
from cadenza.frontend.loaded_model import open_text
from cadenza.loading.build import find_checkpoint
from cadenza.outputs import RequestOutput
from cadenza.server.openai.chat import ChatRequest
from tests.by_day import by_day
from tests.checkpoint.gguf_models import convert
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
