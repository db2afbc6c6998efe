"""The numpy definitions of Qwen2 and Qwen3 are held to transformers, so that they may be
measures themselves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.numpy_decoder import NumpyDecoder
from tests.oracle.numpy_mtp import NumpyMTP

FIXTURES = Path(__file__).parent.parent / "fixtures"


def error_on_qwen2(decoder: NumpyDecoder) -> float:
    return error_on("qwen2-untied-bias", decoder)


def error_on(fixture: str, decoder: NumpyDecoder) -> float:
    """The error of a logit as a share of the range, where transformers gave the logits."""
    with np.load(FIXTURES / fixture / "expected.npz", allow_pickle=False) as expected:
        token_ids, logits = expected["token_ids"].tolist(), expected["logits"]
    return float(np.abs(decoder.logits(token_ids[:-1]) - logits).max() / np.ptp(logits))


def test_the_definition_in_numpy_gives_transformers_logits():
    decoder = NumpyDecoder.open(FIXTURES / "qwen2-untied-bias")
    assert error_on_qwen2(decoder) < 1e-5


def test_a_definition_without_biases_would_be_noticed():
    decoder = NumpyDecoder.open(FIXTURES / "qwen2-untied-bias")
    without = {name: each for name, each in decoder.tensors.items() if not name.endswith("bias")}
    assert error_on_qwen2(replace(decoder, tensors=without)) > 1e-3


@pytest.mark.parametrize("fixture", ["qwen3-untied-bias", "qwen3-moe-tied-bias"])
def test_the_blocks_of_mtp_layers_in_numpy_give_transformers_logits(fixture: str):
    decoder = NumpyMTP.open(FIXTURES / fixture)
    assert error_on(fixture, decoder) < 1e-5
    unnormed = {name: each for name, each in decoder.tensors.items() if "q_norm" not in name}
    assert error_on(fixture, replace(decoder, tensors=unnormed)) > 1e-3
