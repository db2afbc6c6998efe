"""`benchmarks/rivals` and `benchmarks/speculation.py`: ratios and bars, GGUF files, break-even."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals.as_gguf import main
from benchmarks.rivals.beside_openvino import Comparison, judge, read_rival
from benchmarks.rivals.side_by_side import Round
from benchmarks.speculation import acceptance_of, break_even, chances
from cadenza.bench.checkpoints import make_checkpoint, random_weights
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from tests.checkpoint.config_writer import format_model_config, write_random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PRINTED = (
    "  1 rows: decode     34.1 tok/s, prefill   1310.0 tok/s\n"
    " 32 rows: decode    532.0 tok/s, prefill   2570.0 tok/s\n"
)


def test_the_rivals_rates_are_read_by_number_of_rows():
    found = read_rival("loading\n" + PRINTED, ("1", "32"))
    assert found == Round(decode=[34.1, 532.0], prefill=2570.0)
    with pytest.raises(SystemExit, match="printed nothing for 8 rows"):
        read_rival(PRINTED, ("1", "8"))


def test_each_ratio_and_share_has_its_bar():
    ours = [Round(decode=[60.0, 600.0], prefill=3000.0, share=[90.0, 60.0])]
    theirs = [read_rival(PRINTED, ("1", "32"))]
    comparison = Comparison(type="bfloat16", rows=("1", "32"), ours=ours, theirs=theirs)
    prefill, one, many, share_of_one, share = judge("135M", comparison)
    assert str(prefill) == "prefill ratio: 1.17, at least 1.15: yes"
    assert str(one) == "decode ratio at 1 rows: 1.76, at least 1.5: yes"
    assert str(many) == "decode ratio at 32 rows: 1.13, at least 1.15: NO"
    assert (share_of_one.bar, share.bar, share.is_met) == (None, 50.0, True)
    assert not judge("1B", comparison)[-1].is_met


@pytest.mark.slow
def test_a_run_beside_a_stand_in_writes_a_result_of_each_type(tmp_path: Path):
    folder = tmp_path / "model"
    write_random_checkpoint(named_shape("tiny-llama"), folder, seed=1, dtype="bfloat16")
    rival = tmp_path / "rival"
    rival.write_text(f"#!/bin/sh\necho '{PRINTED}'\n")
    rival.chmod(0o755)
    command = [
        *(sys.executable, "-m", "benchmarks.rivals.beside_openvino", folder, tmp_path / "out"),
        *("--openvino", rival, "--shape", "tiny", "--types", "int8", "--rounds", "1"),
        *("--rows", "1,32", "--input-len", "16", "--output-len", "4"),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "decode ratio at 32 rows" in ran.stdout, ran.stderr
    written = json.loads((tmp_path / "out" / "tiny-int8.json").read_text())
    assert written["machine"]["cores"] > 0
    (decode, share, prefill) = written["figures"]
    assert decode["values"]["OpenVINO"] == [[34.1], [532.0]]
    assert len(share["values"]["Cadenza"]) == 2
    assert prefill["values"]["OpenVINO"] == [[2570.0]]
    assert ("not amx" in ran.stdout) == ("(amx)" not in written["machine"]["cpu"])


# Up to four tokens a step waits for the weights, and each one more takes 2 ms.
WAITING = {number: 10.0 + 2.0 * max(0, number - 4) for number in range(1, 65)}


def test_one_draft_breaks_even_where_its_token_is_worth_its_time() -> None:
    assert break_even(WAITING, 3.0, num_rows=1, most=1) == (pytest.approx(0.3), 1)
    assert break_even(WAITING, 3.0, num_rows=4, most=1) == (pytest.approx(1.1), 1)


def test_the_number_of_drafts_is_the_one_that_breaks_even_first() -> None:
    steps_ms = {1: 10.0, 2: 16.0, 3: 16.0, 4: 16.0}
    least, number = break_even(steps_ms, 0.0, num_rows=1, most=3)
    assert number == 3
    assert least + least**2 + least**3 == pytest.approx(0.6)


def test_numbers_of_drafts_that_were_not_measured_are_left_out() -> None:
    assert break_even({16: 10.0, 32: 14.0}, 1.0, num_rows=16, most=5) == (pytest.approx(0.5), 1)


def test_drafts_that_cost_nothing_need_no_acceptance() -> None:
    assert break_even(WAITING, 0.0, num_rows=1, most=3)[0] == 0.0


@pytest.mark.parametrize("acceptance", [0.2, 0.9, 1.0, 1.3])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_acceptance_gives_the_expected_tokens(acceptance: float, number: int) -> None:
    num_tokens = sum(acceptance**place for place in range(number + 1))
    assert acceptance_of(num_tokens, number) == pytest.approx(acceptance)


@pytest.mark.parametrize("text", ["some/model", "0.5,1.5", "0.5,", "nan"])
def test_what_are_no_chances_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}': give numbers from 0 to 1"):
        chances(text)


def test_chances_are_read() -> None:
    assert chances("0.6,0.8,0.0") == [0.6, 0.8, 0.0]


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
