"""Folders with float8_e4m3 weights through the faces: what `verify` and `info` say of them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.cli import main
from cadenza.verification.run import verify
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.test_float8_weights import CASES
from tests.faces.test_verification import SMALL, ignore


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
