"""Folders with quantised weights, run: `cadenza quantize` against the flag, and `verify` of each
method.
"""

import json
from pathlib import Path

import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint import named_shape, write_random_checkpoint
from cadenza.cli import main
from cadenza.config import Quantization
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.quantised_writers import ALIGNED, METHODS

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


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_verify_passes_on_a_folder_of_each_method(tmp_path: Path, method: str):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    settings, store = METHODS[method]
    folder = write_quantised(tmp_path, str(tmp_path / "config.json"), settings, store)
    assert main(["verify", str(folder)]) == 0
