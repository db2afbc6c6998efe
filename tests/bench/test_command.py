"""`cadenza bench …` end to end on a tiny random shape: what it prints and how it refuses.

No speed is asserted, only that the figures are there and agree with each other.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza import EngineConfig
from cadenza.backends import find_backend
from cadenza.bench.startup import PHASES
from cadenza.bench.throughput import measure_throughput
from cadenza.bench.workloads import Workload
from cadenza.cli import main
from cadenza.cli.bench_report import print_throughput
from tests.faces.stub_backend import STUBS

SIZES = ("--input-len", "20", "--output-len", "6", "--repeats", "2", "--concurrency", "1,3")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def bench(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return bench


def is_native() -> bool:
    return find_backend("auto").open_instruments() is not None


def test_throughput_prints_one_object_whose_figures_agree(run: Run, shape_file: Path):
    code, out, err = run("throughput", "--shape", shape_file, *SIZES, "--json")
    assert code == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert set(found) == {"machine", "workload", "roofline", "results"}
    assert set(found["roofline"]) == {"read_gb_s", "gflop_s"}
    assert [each["concurrency"] for each in found["results"]] == [1, 3]
    for each in found["results"]:
        assert each["num_decode_steps"] == 5
        assert each["num_prefill_tokens"] % 20 == 0
        assert each["num_prefill_tokens"] >= 4 * found["workload"]["max_num_batched_tokens"]
        for kind in ("decode", "prefill"):
            runs, shares = each[f"{kind}_tok_s_runs"], each[f"{kind}_share_runs"]
            assert each[f"{kind}_tok_s"] == pytest.approx(sum(runs) / 2)
            assert each[f"{kind}_share_of_bound"] == pytest.approx(sum(shares) / 2)
            bounds = [rate / share for rate, share in zip(runs, shares, strict=True)]
            assert each[f"{kind}_bound_tok_s"] == pytest.approx(sum(bounds) / 2)
            assert each[f"{kind}_limit"] in {"read", "multiply"}
    assert err == ""


@pytest.mark.parametrize("sampling", [pytest.param("one", marks=pytest.mark.soak), "all"])
def test_rows_can_be_sampled_with_penalties(run: Run, shape_file: Path, sampling: str):
    flags = ("--sampling", sampling, "--json")
    code, out, _ = run("throughput", "--shape", shape_file, *SIZES, *flags)
    assert code == 0
    assert json.loads(out)["workload"]["sampling"] == sampling


def test_throughput_prints_a_table_for_people(run: Run, shape_file: Path):
    code, out, _ = run("throughput", "--shape", shape_file, *SIZES)
    assert code == 0
    assert "roofline:" in out
    assert "prefill" in out


def test_a_device_without_known_bounds_has_rates_without_shares(
    capsys: pytest.CaptureFixture[str],
):
    workload = Workload(input_len=20, output_len=6, repeats=2, concurrency=(1, 3))
    config = EngineConfig(backend="stub")
    found = measure_throughput(None, config, workload, lambda _: None, STUBS)
    print_throughput(found, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["roofline"] is None
    for each in told["results"]:
        for kind in ("decode", "prefill"):
            assert each[f"{kind}_tok_s"] == pytest.approx(sum(each[f"{kind}_tok_s_runs"]) / 2)
            assert each[f"{kind}_tok_s"] > 0
            for name in ("share_of_bound", "share_runs", "bound_tok_s", "limit"):
                assert each[f"{kind}_{name}"] is None
    print_throughput(found, as_json=False)
    out = capsys.readouterr().out
    assert "roofline" not in out
    assert "no bound is known for stub:cpu, so no share of one" in out


@pytest.mark.native
def test_a_profile_names_every_operation_of_a_step(run: Run, shape_file: Path):
    code, out, _ = run("throughput", "--shape", shape_file, *SIZES, "--json", "--profile")
    assert code == 0
    for result in json.loads(out)["results"]:
        for profile in result["profile"].values():
            calls = {each["op"]: each["calls"] for each in profile["ops"]}
            assert calls == {
                "embed": 1,
                "rms_norm": 5,
                "take_rows": 2,
                "linear": 6,
                "gated_linear": 2,
                "rope_append_attend": 2,
                "next_token": 1,
            }
            assert all(each["read_bytes"] > 0 for each in profile["ops"])
            kept = profile["kernels_ms"] + profile["rest_ms"]
            assert kept == pytest.approx(profile["step_ms"])


def test_a_profile_of_the_reference_ops_is_refused(run: Run, shape_file: Path):
    code, _, err = run("throughput", "--shape", shape_file, "--profile", "--ops", "reference")
    assert (code, err.count("--profile")) == (2, 1)


def test_make_checkpoint_writes_a_folder_that_throughput_takes(run: Run, tmp_path: Path):
    arguments = ("--shape", "tiny-qwen3", "--dtype", "bfloat16", "--seed", "7")
    code, out, _ = run("make-checkpoint", *arguments, tmp_path / "made")
    assert code == 0
    assert "bfloat16, seed 7" in out
    code, out, _ = run("throughput", tmp_path / "made", *SIZES, "--concurrency", "2", "--json")
    assert code == 0
    assert json.loads(out)["workload"]["model"] == "made"


def test_roofline_prints_one_object(run: Run):
    code, out, _ = run("roofline", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["roofline"]["read_gb_s"] > 0
    assert found["roofline"]["gflop_s"] > 0
    assert found["roofline"]["method"] == ("native" if is_native() else "numpy")


def test_startup_reports_every_phase_of_cold_and_warm_starts(run: Run, tmp_path: Path):
    run("make-checkpoint", "--shape", "tiny-llama", tmp_path / "made")
    limits = ("-np", "2", "-c", "64", "--max-num-batched-tokens", "64")
    code, out, _ = run("startup", tmp_path / "made", *limits, "--repeats", "1", "--json")
    assert code == 0
    cold, warm = json.loads(out)["results"]
    assert (cold["caches"], warm["caches"]) == ("cold", "warm")
    for each in (cold, warm):
        assert set(each["phases_s"]) == set(PHASES)
        assert each["total_s"] == pytest.approx(sum(each["phases_s"].values()))
        assert all(seconds >= 0 for seconds in each["phases_s"].values())


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("throughput", "--concurrency", "four"), 2, "--concurrency"),
        (("throughput", "--concurrency", "0"), 2, "--concurrency"),
        (("throughput", "--output-len", "1"), 2, "--output-len"),
        (("throughput", "--repeats", "0"), 2, "--repeats"),
        (("throughput", "folder", "--shape", "tiny-llama"), 2, "--shape"),
        (("throughput", "--shape", "no-such-shape"), 3, "no-such-shape"),
        (("startup", "--repeats", "0"), 2, "--repeats"),
        (("make-checkpoint", "out", "--shape", "tiny-llama", "--dtype", "int8"), 2, "--dtype"),
        (("make-checkpoint", "out", "--shape", "tiny-llama", "--seed", "-1"), 2, "--seed"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    run: Run, arguments: tuple[str, ...], code: int, word: str
):
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert word in err
