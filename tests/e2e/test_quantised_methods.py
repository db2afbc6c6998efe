"""Folders with quantised weights, run: `cadenza quantize` against the flag, and `verify` of each
method.
"""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.cli import main
from cadenza.config import Quantization
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.quantised_writers import ALIGNED, METHODS
from tests.contract.backends import needs_mlx

PROMPTS = [[5, 6, 7, 8], [9, 10]]
PARAMS = SamplingParams(max_tokens=8, logprobs=3, temperature=0.0)


def streams(model: Path, quantization: Quantization = "none") -> list[object]:
    llm = LLM(str(model), quantization=quantization, max_model_len=64, max_num_seqs=2)
    try:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, PARAMS)]
        return [(each.token_ids, each.logprobs) for each in outputs]
    finally:
        llm.close()


def test_the_folder_of_quantize_gives_the_bits_of_the_flag(tmp_path: Path):
    plain = tmp_path / "plain"
    write_random_checkpoint(named_shape("tiny-qwen2"), plain, seed=1, dtype="bfloat16")
    found: dict[str, list[object]] = {}
    for scheme in ("int8", "int4"):
        arguments = ["quantize", str(plain), str(tmp_path / scheme), "--scheme", scheme]
        assert main(arguments) == 0
        found[scheme] = streams(tmp_path / scheme)
        assert found[scheme] == streams(plain, scheme)
    assert found["int8"] != found["int4"]


TOKEN_INT8 = {"num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("method", "inputs", "stated"),
    [
        ("awq", None, None),
        ("compressed-8", None, None),
        ("compressed-8", TOKEN_INT8, "int8 per token"),
    ],
    ids=["W4A16", "W8A16", "W8A8"],
)
def test_info_tells_the_activations_that_a_folder_states_and_those_that_are_used(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    inputs: dict[str, object] | None,
    stated: str | None,
):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    settings, store = METHODS[method]
    if inputs is not None:
        settings = deepcopy(settings)
        settings["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    folder = write_quantised(tmp_path, str(tmp_path / "config.json"), settings, store)
    assert main(["info", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["stated_activations"] == stated
    assert facts["engine"]["activations"] == "int8 per token and group of 32, 16 bits in one of 64"


@needs_mlx
def test_info_tells_that_mlx_rounds_no_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    folder = write_quantised(tmp_path, str(tmp_path / "config.json"), *METHODS["mlx-4"])
    assert main(["info", str(folder), "--backend", "mlx", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engine"]["activations"] == facts["engine"]["dtype"]


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_verify_passes_on_a_folder_of_each_method(tmp_path: Path, method: str):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    settings, store = METHODS[method]
    folder = write_quantised(tmp_path, str(tmp_path / "config.json"), settings, store)
    assert main(["verify", str(folder)]) == 0
