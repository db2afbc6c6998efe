"""The numpy definition of Qwen2 is held to transformers, so that it may be a measure itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.oracle.numpy_decoder import NumpyDecoder

FIXTURES = Path(__file__).parent.parent / "fixtures"


def error_on_qwen2(decoder: NumpyDecoder) -> float:
    """The error of a logit as a share of the range, where transformers gave the logits."""
    with np.load(FIXTURES / "qwen2-untied-bias" / "expected.npz", allow_pickle=False) as expected:
        token_ids, logits = expected["token_ids"].tolist(), expected["logits"]
    return float(np.abs(decoder.logits(token_ids[:-1]) - logits).max() / np.ptp(logits))


def test_the_definition_in_numpy_gives_transformers_logits():
    decoder = NumpyDecoder.open(FIXTURES / "qwen2-untied-bias")
    assert error_on_qwen2(decoder) < 1e-5


def test_a_definition_without_biases_would_be_noticed():
    decoder = NumpyDecoder.open(FIXTURES / "qwen2-untied-bias")
    without = {name: each for name, each in decoder.tensors.items() if not name.endswith("bias")}
    assert error_on_qwen2(replace(decoder, tensors=without)) > 1e-3
