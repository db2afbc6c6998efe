"""`cadenza bench …` end to end on a tiny random shape: what it prints and how it refuses. No speed
is asserted, only that the figures are there and agree with each other."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cadenza import EngineConfig
from cadenza.backends import find_backend
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.machine import Cost, Roofline, describe_machine
from cadenza.bench.runs import OpShare, StepProfile, Timed
from cadenza.bench.throughput import (
    ConcurrencyResult,
    Rate,
    RatedRun,
    Throughput,
    measure_throughput,
)
from cadenza.bench.workloads import Workload
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.cli import main
from cadenza.cli.app import build_app
from cadenza.cli.bench import NAMES
from cadenza.cli.bench_report import throughput_result, throughput_watch
from cadenza.cli.options import variables_of
from cadenza.cli.report import Shown
from cadenza.cli.status import status_line
from cadenza_bench.startup import PHASES, Startup, startup_result
from cadenza_bench.startup_probe import measure_start
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


# Calls of a step of the tiny shape.
OPS = {
    "embed": 1,
    "rms_norm": 5,
    "take_rows": 2,
    "linear": 6,
    "gated_linear": 2,
    "rope_append_attend": 2,
    "next_token": 1,
}


def test_throughput_prints_one_object_whose_figures_agree(run: Run, shape_file: Path):
    """With sampled rows and, where there are native kernels, a profile."""
    flags = ("--sampling", "all", "--json", *(["--profile"] if is_native() else []))
    code, out, _ = run("throughput", "--shape", shape_file, *SIZES, *flags)
    assert code == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert set(found) == {"machine", "workload", "roofline", "results"}
    assert set(found["roofline"]) == {"read_gb_s", "gflop_s"}
    assert found["workload"]["sampling"] == "all"
    assert [each["concurrency"] for each in found["results"]] == [1, 3]
    for each in found["results"]:
        assert each["num_decode_steps"] == 5
        assert each["num_prefill_tokens"] % 20 == 0
        assert each["num_prefill_tokens"] >= 4 * found["workload"]["max_num_batched_tokens"]
        for kind in ("decode", "prefill"):
            runs, shares = each[f"{kind}_tok_s_runs"], each[f"{kind}_share_runs"]
            assert each[f"{kind}_tok_s"] == pytest.approx(sum(runs) / 2)
            bounds = [rate / share for rate, share in zip(runs, shares, strict=True)]
            assert each[f"{kind}_bound_tok_s"] == pytest.approx(sum(bounds) / 2)
            share = each[f"{kind}_tok_s"] / each[f"{kind}_bound_tok_s"]
            assert each[f"{kind}_share_of_bound"] == share
            assert each[f"{kind}_limit"] in {"read", "multiply"}
        for profile in each.get("profile", {}).values():
            assert {op["op"]: op["calls"] for op in profile["ops"]} == OPS
            assert all(op["read_bytes"] > 0 for op in profile["ops"])
            kept = profile["kernels_ms"] + profile["rest_ms"]
            assert kept == pytest.approx(profile["step_ms"])


def test_a_device_without_known_bounds_has_rates_without_shares(capsys: pytest.CaptureFixture[str]):
    workload = Workload(input_len=20, output_len=6, repeats=2, concurrency=(1, 3))
    config = EngineConfig(backend="stub")
    with status_line("starting") as status:
        found = measure_throughput(None, config, workload, throughput_watch(status), STUBS)
    told = throughput_result(found).object
    assert told["roofline"] is None
    for each in told["results"]:
        for kind in ("decode", "prefill"):
            assert each[f"{kind}_tok_s"] == pytest.approx(sum(each[f"{kind}_tok_s_runs"]) / 2)
            assert each[f"{kind}_tok_s"] > 0
            for name in ("share_of_bound", "share_runs", "bound_tok_s", "limit"):
                assert each[f"{kind}_{name}"] is None
    out = capsys.readouterr().out
    assert re.search(r"^1 +[\d.]+ +– +– +– +[\d.]+ +– +– +–\n3 ", out, re.MULTILINE)
    text = "\n".join(map(str, throughput_result(found).text))
    assert "roofline" not in text
    assert "no bound is known for stub:cpu, so no share of one" in text


def test_what_is_known_is_printed_while_the_rest_is_measured():
    """The machine before the model is loaded, each row when it is known, and how long it takes."""
    told: list[str] = []

    @dataclass(frozen=True, slots=True)
    class Told:
        def __call__(self, text: str, /) -> None:
            told.append(text)

        def print(self, line: str) -> None:
            told.append(f"printed: {line.split(maxsplit=1)[0]}")

    workload = Workload(input_len=20, output_len=6, repeats=2, concurrency=(1, 3))
    config = EngineConfig(backend="stub")
    measure_throughput(None, config, workload, throughput_watch(Told()), STUBS)
    assert [re.sub(r"\d+ (s|min) left", "N left", each) for each in told] == [
        "printed: machine:",
        "loading the model",
        "printed: model:",
        "measuring the machine",
        "1 row: warming up",
        "1 row: run 1 of 2",
        "1 row: run 2 of 2, about N left",
        "printed: 1",
        "3 rows: warming up, about N left",
        "3 rows: run 1 of 2, about N left",
        "3 rows: run 2 of 2, about N left",
        "printed: 3",
    ]


def test_rates_with_a_bound_and_a_profile_are_tables_for_people(capsys: pytest.CaptureFixture[str]):
    machine = Roofline(read_gb_s=45.0, gflop_s=970.0, dtype="bfloat16", method="native")
    timed = Timed(elapsed_s=2.0, num_tokens=8, num_steps=4, context=3.0)
    op = OpShare(op="linear", calls=6, ms=1.5, read_bytes=3 << 20)
    rate = Rate(
        runs=(RatedRun(run=timed, roofline=machine),),
        cost=Cost(read_bytes=9e9, operations=1e9),
        num_tokens=2,
        profile=StepProfile(step_ms=2.0, ops=(op,)),
    )
    found = Throughput(
        machine=describe_machine(None),
        workload={"model": "m", "dtype": "bfloat16", "ops": "native"}
        | {"input_len": 1, "output_len": 2, "repeats": 1},
        roofline=machine,
        results=(ConcurrencyResult(concurrency=2, decode=rate, prefill=rate),),
    )
    throughput_result(found).show(Shown())
    out = capsys.readouterr().out
    for said in ("read 45.0 GB/s, 970 GFLOP/s in bfloat16", "reading", "decode step at 2 rows:"):
        assert said in out
    assert re.search(r"linear +6 +1\.500 +3\.0 MiB +2\.1 GB/s +75%", out)
    assert re.search(r"left in XLA and host +0\.500 +25%", out)


def test_a_profile_of_the_reference_ops_is_refused(run: Run, shape_file: Path):
    code, _, err = run("throughput", "--shape", shape_file, "--profile", "--ops", "reference")
    assert (code, err.count("--profile")) == (2, 1)


def test_make_checkpoint_writes_a_folder_that_opens(run: Run, tmp_path: Path):
    arguments = ("--shape", "tiny-qwen3", "--dtype", "bfloat16", "--seed", "7")
    code, out, _ = run("make-checkpoint", *arguments, tmp_path / "made")
    assert code == 0
    assert "bfloat16, seed 7" in out
    assert open_checkpoint(tmp_path / "made").config.dtype == "bfloat16"


def test_roofline_prints_one_object(run: Run):
    code, out, _ = run("roofline", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["roofline"]["read_gb_s"] > 0
    assert found["roofline"]["gflop_s"] > 0
    assert found["roofline"]["method"] == ("native" if is_native() else "numpy")


STARTUP = ("-np", "2", "-c", "64", "--max-num-batched-tokens", "64")


@pytest.mark.soak
def test_startup_reports_every_phase_of_cold_and_warm_starts(run: Run, tmp_path: Path):
    run("make-checkpoint", "--shape", "tiny-llama", tmp_path / "made")
    code, out, _ = run("startup", tmp_path / "made", *STARTUP, "--repeats", "1", "--json")
    assert code == 0
    cold, warm = json.loads(out)["results"]
    assert (cold["caches"], warm["caches"]) == ("cold", "warm")
    for each in (cold, warm):
        assert set(each["phases_s"]) == set(PHASES)
        assert each["total_s"] == pytest.approx(sum(each["phases_s"].values()))
        assert all(seconds >= 0 for seconds in each["phases_s"].values())


def test_a_start_ends_its_phases_in_their_order(shape_file: Path, tmp_path: Path):
    """In this process; `make soak` starts new ones."""
    folder = cached_checkpoint(str(shape_file), tmp_path)
    limits = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64}
    at_s = measure_start(json.dumps({"model": str(folder), "config": limits}))
    assert sorted(at_s, key=at_s.__getitem__) == list(PHASES)


def test_startup_prints_the_phases_of_the_middle_start_and_the_worst(
    capsys: pytest.CaptureFixture[str],
):
    starts = ((0.1, 0.2, 0.3, 0.4, 0.9), (0.1, 0.2, 0.3, 1.4, 0.5), (0.1, 0.2, 0.3, 0.6, 0.5))
    found = [Startup(caches="cold", starts=starts)]
    startup_result({}, found).show(Shown(json=True))
    (told,) = json.loads(capsys.readouterr().out)["results"]
    assert told["phases_s"]["compile"] == 0.4
    assert told["total_s"] == pytest.approx(sum(told["phases_s"].values()))
    assert (told["caches"], told["total_s"]) == ("cold", pytest.approx(1.9))
    startup_result({}, found).show(Shown())
    out = capsys.readouterr().out
    assert re.search(r"cold .*0\.40 s .*1\.90 s .*2\.50 s", out)
    assert "the start of the median time of 3 starts" in out


APP: Any = get_command(build_app())
BENCH: Any = APP.commands["bench"]


def parsed(command: str, *arguments: object) -> dict[str, Any]:
    words = [str(each) for each in arguments]
    return BENCH.commands[command].make_context(command, words).params


def test_quick_plays_few_and_short_runs():
    quick, whole = parsed("throughput", "--quick"), parsed("throughput")
    assert (quick["concurrency"], quick["output_len"], quick["repeats"]) == ((1, 8), 32, 1)
    assert (whole["concurrency"], whole["output_len"], whole["repeats"]) == (None, None, None)
    batching = parsed("batching", "--quick")  # more requests than rows, so that some wait
    assert (batching["max_num_seqs"], batching["num_requests"], batching["repeats"]) == (4, 12, 1)
    assert parsed("startup", "--quick")["repeats"] == 1
    assert parsed("load", "--quick")["repeats"] == 2


def test_quick_loads_a_server_with_few_requests():
    quick = parsed("serve", "http://127.0.0.1:1", "--quick")
    assert (quick["concurrency"], quick["num_requests"]) == ((1, 8), 12)
    assert quick["output_lens"] == (16, 32)


@pytest.mark.parametrize("order", [1, -1])
def test_flags_and_the_file_come_before_quick(tmp_path: Path, order: int):
    file = tmp_path / "bench.toml"
    file.write_text("repeats = 3\nmax_num_seqs = 9\n")
    words = [["--quick"], ["--config", file], ["--concurrency", "4"]][::order]
    found = parsed("throughput", *(word for part in words for word in part))
    assert (found["concurrency"], found["repeats"], found["output_len"]) == ((4,), 3, 32)
    assert found["max_num_seqs"] == 9


def test_the_flag_says_what_it_stands_for():
    for command, form in (("throughput", "--concurrency 1,8 --output-len 32"), ("load", "--rep")):
        option = next(each for each in BENCH.commands[command].params if each.name == "quick")
        assert form in option.help


def test_all_commands_are_there_and_none_has_a_variable_that_no_other_command_has():
    """So that a start need not make them to know the variables."""
    assert tuple(BENCH.commands) == NAMES
    own = frozenset[str]().union(*map(variables_of, BENCH.commands.values()))
    assert own
    assert own <= variables_of(APP)
