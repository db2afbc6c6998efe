"""`cadenza bench batching`: modes on the token-storing runner and a clock of steps, by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza import EngineConfig
from cadenza.bench.workloads import PlannedRequest
from cadenza.cli import main
from cadenza.cli.report import Shown
from cadenza.errors import ConfigError
from cadenza_bench.batching.bars import Bar, ideal_gain
from cadenza_bench.batching.plan import (
    SETTINGS,
    BatchingLoad,
    BatchingMode,
    BatchingOptions,
    BatchingPlan,
)
from cadenza_bench.batching.player import POLICIES, BatchPlayer, PlayedRequest, PlayTask
from cadenza_bench.batching.report import batching_result
from cadenza_bench.batching.rounds import Compared, compare_modes, fitted_config, rate_workload
from tests.bench.batching_cases import (
    ANSWERS,
    AT_ONCE,
    ROWS,
    RowDependentRunner,
    StepClock,
    compared,
    make_core,
    planned,
    result,
    small_plan,
)


def play(
    mode: BatchingMode, requests: list[PlannedRequest], clients: int | None = None
) -> list[PlayedRequest]:
    core = make_core()
    task = PlayTask(
        policy=POLICIES[mode],
        rows=ROWS,
        requests=requests,
        salts=[mode] * len(requests),
        clients=clients,
    )
    player = BatchPlayer(core, task, StepClock(core).timing)
    played = player.play()
    player.drain()
    assert core.is_idle
    core.check_invariants()
    return played


def spans(played: list[PlayedRequest]) -> list[tuple[float, float]]:
    """The first and the last token's time of each request."""
    return [(each.content_s[0], each.content_s[-1]) for each in played]


# Modes


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("continuous", [(1, 2), (1, 6), (3, 5), (6, 8)]),
        ("static", [(1, 2), (1, 6), (7, 9), (7, 9)]),
        ("static-whole", [(6, 6), (6, 6), (9, 9), (9, 9)]),
        ("sequential", [(1, 2), (3, 8), (9, 11), (12, 14)]),
        ("padded", [(1, 2), (1, 6), (7, 9), (7, 9)]),
    ],
)
def test_a_mode_says_when_requests_start_and_when_answers_are_handed_over(
    mode: BatchingMode, expected: list[tuple[float, float]]
):
    assert spans(play(mode, planned(ANSWERS))) == expected


def test_padded_rows_go_on_and_their_tokens_are_counted_out():
    core = make_core()
    task = PlayTask(policy=POLICIES["padded"], rows=ROWS, requests=planned((2, 6)), salts=["", ""])
    player = BatchPlayer(core, task, StepClock(core).timing)
    assert [len(each.token_ids) for each in player.play()] == [2, 6]
    player.drain()
    assert core.is_idle
    assert core.scheduler.num_scheduled_tokens == 2 * (4 + 5)


def test_all_modes_give_the_tokens_that_a_request_has_alone():
    alone = [tuple(each.token_ids) for each in play("sequential", planned(ANSWERS))]
    assert len(set(alone)) == len(ANSWERS)
    for mode in POLICIES:
        assert [tuple(each.token_ids) for each in play(mode, planned(ANSWERS))] == alone


def test_a_client_sends_its_next_request_when_its_answer_was_handed_over():
    played = play("static-whole", planned((2, 6, 3, 3)), clients=2)
    assert [each.due_s for each in played] == [0, 0, 6, 6]
    played = play("continuous", planned((2, 6, 3, 3)), clients=2)
    assert [each.due_s for each in played] == [0, 0, 2, 5]


def test_requests_at_a_rate_are_waited_for_and_counted_from_when_they_were_due():
    late = [
        replace(each, after_s=at) for each, at in zip(planned((3, 3)), (0.5, 9.25), strict=True)
    ]
    played = play("continuous", late)
    assert [each.due_s for each in played] == [0.5, 9.25]
    assert spans(played) == [(1.5, 3.5), (10.25, 12.25)]


def test_a_static_batch_takes_those_that_have_come_when_the_last_one_ends():
    arrivals = (0.0, 0.5, 1.5, 1.75)
    requests = [
        replace(each, after_s=at) for each, at in zip(planned(ANSWERS), arrivals, strict=True)
    ]
    assert spans(play("static", requests)) == [(1, 2), (3, 8), (3, 5), (9, 11)]


# Plans


def test_a_plan_gives_the_same_requests_each_time_and_others_for_another_seed():
    plan = BatchingOptions(num_requests=5).plan()
    assert plan.requests(97) == plan.requests(97)
    assert plan.requests(97) != replace(plan, seed=1).requests(97)
    for each in plan.requests(97):
        assert 16 <= len(each.prompt_token_ids) <= 128
        assert 8 <= each.max_tokens <= 96


def test_setting_c_has_one_long_answer_in_each_ten():
    lens = [each.max_tokens for each in SETTINGS["C"].requests(97)]
    for at in range(0, len(lens), 10):
        assert sorted(lens[at : at + 10])[-1] == 512
        assert all(8 <= each <= 16 for each in sorted(lens[at : at + 10])[:-1])
    assert ideal_gain("padded", lens, 8) >= 5


def test_setting_d_has_one_system_prompt_and_other_questions():
    requests = SETTINGS["D"].requests(97)
    assert len({each.prompt_token_ids[:2000] for each in requests}) == 1
    assert len({each.prompt_token_ids[2000:] for each in requests}) == len(requests)


def test_arrivals_of_twice_the_rate_come_in_half_the_time():
    plan = BatchingPlan(num_requests=2000)
    slow, fast = (plan.arrivals_s(BatchingLoad(rate=rate)) for rate in (5.0, 10.0))
    assert fast == [pytest.approx(each / 2) for each in slow]
    assert slow[0] == 0.0
    assert slow[-1] / 1999 == pytest.approx(1 / 5, rel=0.1)
    assert set(plan.arrivals_s(AT_ONCE)) == {0.0}


def test_loads_are_of_clients_then_of_rates_and_inf_is_at_once():
    given = BatchingOptions(concurrency=(1, 4), request_rate=(2.5, math.inf)).plan().loads
    assert given == (
        BatchingLoad(clients=1),
        BatchingLoad(clients=4),
        BatchingLoad(rate=2.5),
        AT_ONCE,
    )
    assert [each.label for each in given] == [
        "1 client",
        "4 clients",
        "2.5 requests/s",
        "all at once",
    ]
    assert BatchingOptions(max_num_seqs=3).plan().loads == (BatchingLoad(clients=3), AT_ONCE)
    assert [each.clients for each in BatchingOptions(setting="A").plan().loads] == [1, 2, 4, 8]


def test_flags_change_a_setting():
    plan = BatchingOptions(setting="B", num_requests=9, output_lens=(3, 5), max_num_seqs=2).plan()
    assert (plan.num_requests, plan.output_lens, plan.rows) == (9, (3, 5), 2)
    assert plan.prompt_lens == (32, 512)


# Comparisons


def test_every_mode_plays_every_load_in_every_round_with_equal_tokens():
    plan = small_plan()
    found = compared(plan)
    assert [(each.mode, each.load) for each in found.figures] == [
        (mode, load) for load in plan.loads for mode in plan.modes
    ]
    for each in found.figures:
        assert (each.gain is None) == (each.mode == "continuous")
        assert [run.round for run in each.runs] == [1, 2]
        assert each.num_cached_tokens == 0
    assert found.difference is None
    assert found.rates is not None
    assert sorted(found.rates.decode_step_s) == [1, 2]
    assert batching_result(result(plan, found), BatchingOptions()).exit_code == 0


def test_a_runner_whose_tokens_depend_on_the_rows_fails_the_comparison(
    capsys: pytest.CaptureFixture[str],
):
    plan = small_plan()
    found = compared(plan, RowDependentRunner)
    difference = found.difference
    assert difference is not None
    assert (difference.expected_of, difference.round) == ("continuous, 2 clients, round 1", 1)
    assert difference.found != difference.expected
    shown = batching_result(result(plan, found), BatchingOptions())
    assert shown.show(Shown()) == 1
    text = f"request {difference.request}, token {difference.position} of the answer"
    assert text in capsys.readouterr().out
    assert shown.show(Shown(json=True)) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_equal"] is False
    assert told["first_difference"]["mode"] == difference.mode


def test_hits_are_told_from_misses_by_their_salts():
    plan = small_plan(
        setting="D", modes=(), loads=(BatchingLoad(clients=1),), system_len=96, num_requests=3
    )
    found = compared(plan)
    miss, hit = found.figures
    assert (miss.mode, miss.num_cached_tokens) == ("miss", 0)
    assert (hit.mode, hit.num_cached_tokens) == ("hit", 3 * 96)
    (bar,) = found.bars
    assert bar.ideal == pytest.approx(hit.num_prompt_tokens / (hit.num_prompt_tokens - 3 * 96))
    assert bar.required == min(7.0, bar.ideal)
    assert bar.ratio == pytest.approx(2.0)  # 96 tokens and more are two steps of 64, and one
    assert not bar.is_met
    assert bar.required > 2.1


def test_a_missed_bar_decides_the_exit_code_only_where_bars_are_checked():
    plan = small_plan(setting="B")
    missed = Bar(what="a ratio", over=(1.0, 1.25), under=(1.0, 1.0), required=1.14)
    found = Compared(figures=(), rates=None, bars=(missed,), difference=None)
    shown = result(plan, found)
    assert batching_result(shown, BatchingOptions(setting="B")).exit_code == 0
    assert batching_result(shown, BatchingOptions(setting="B", check=True)).exit_code == 1


def test_a_pool_without_room_for_all_rows_is_refused():
    core = make_core(num_pages=3)
    with pytest.raises(ConfigError, match="need 4 KV pages, and there are 3"):
        compare_modes(core, small_plan(), lambda _: None)


# The command


def test_the_engine_has_the_rows_and_the_context_of_the_plan():
    plan = BatchingOptions(setting="B", max_num_seqs=4).plan()
    assert rate_workload(plan).concurrency == (1, 2, 4)
    fitted = fitted_config(EngineConfig(), plan, 256, 8192)
    assert fitted.max_num_seqs == 4
    assert fitted.max_model_len == 512 + 256
    plan = BatchingOptions(setting="D").plan()
    assert fitted_config(EngineConfig(), plan, 256, 8192).max_model_len == 2000 + 64 + 8
    short = BatchingOptions(prompt_lens=(100, 100), output_lens=(1, 2)).plan()
    sizes = rate_workload(short)
    assert (sizes.input_len, sizes.output_len) == (100, 16)
    needed = 100 + sizes.most_tokens(8, 32)
    assert fitted_config(EngineConfig(), short, 32, 8192).max_model_len == needed > 102


def test_the_system_prompt_of_setting_d_fits_the_context():
    plan = BatchingOptions(setting="D").plan()
    assert plan.within(8192).system_len == 2000
    fitted = plan.within(2048)
    assert fitted.system_len == 2048 - 64 - 8
    assert fitted_config(EngineConfig(), fitted, 256, 2048).max_model_len == 2048
    with pytest.raises(ConfigError, match=r"more than the 72 tokens .* here are 72; raise"):
        plan.within(72)
    other = BatchingOptions(setting="A").plan()
    assert other.within(72) is other


def test_runs_that_the_model_has_no_positions_for_are_refused():
    plan = BatchingOptions(setting="B").plan()
    with pytest.raises(ConfigError, match="take 768 tokens, and the model has 512 positions"):
        fitted_config(EngineConfig(), plan, 256, 512)


def test_the_command_prints_one_object_and_draws(
    shape_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sizes = ("--input-len", "4:20", "--output-len", "2:6", "--repeats", "1")
    flags = ("--max-num-seqs", "2", "--num-requests", "4", "--request-rate", "1000")
    shape = ("--shape", str(shape_file), "--plot", str(tmp_path))
    capsys.readouterr()
    assert main(["bench", "batching", *shape, *sizes, *flags, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert {"machine", "workload", "rates", "results", "bars", "tokens_equal"} <= set(found)
    assert found["workload"]["loads"] == ["1000 requests/s"]
    assert [each["mode"] for each in found["results"]] == list(POLICIES)
    for each in found["results"]:
        assert each["num_output_tokens"] == found["results"][0]["num_output_tokens"]
        assert each["ttft"]["count"] == 4
        assert set(each["ttft"]) >= {"mean_s", "p50_s", "p95_s", "p99_s"}
        assert each["tok_s"] == pytest.approx(each["num_output_tokens"] / each["duration_s"])
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "timeline.png").exists()


def test_setting_d_runs_on_a_model_whose_context_is_shorter_than_its_prompt(
    shape_file: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ("--setting", "D", "--num-requests", "2", "--repeats", "1", "--json")
    assert main(["bench", "batching", *flags, "--shape", str(shape_file)]) == 0
    found = json.loads(capsys.readouterr().out)
    context = json.loads(shape_file.read_text())["max_position_embeddings"]
    assert found["workload"]["system_len"] == context - 64 - 8 < 2000
    hit = found["results"][1]
    assert hit["num_cached_tokens"] > 0
    assert found["bars"][0]["ratio"] == found["bars"][0]["value"] / found["bars"][0]["base"]
