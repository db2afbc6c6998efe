"""`benchmarks/rivals/beside_openvino.py`: its ratios and bars, and a run beside a stand-in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rivals.beside_openvino import Comparison, judge, read_rival
from benchmarks.rivals.side_by_side import Round
from cadenza.checkpoint.random_checkpoint import named_shape
from tests.checkpoint.config_writer import write_random_checkpoint

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
