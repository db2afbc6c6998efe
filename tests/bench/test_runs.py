"""What a run counts and when its clock runs, on the token-storing runner and a clock of steps."""

from collections.abc import Callable, Sequence

import pytest

from cadenza import EngineCore
from cadenza.backends.base import OpTotals
from cadenza.backends.fake import FakeRunner
from cadenza.bench.runs import (
    DecodeTask,
    Timed,
    calls_of_a_step,
    run_decode,
    run_prefill,
    step_profile,
    touched_bytes,
)
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions
from cadenza.errors import ConfigError

ROWS = 4


def make_core(num_pages: int = 64, loop: str = "overlap") -> EngineCore:
    limits = EngineLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=16,
        max_model_len=128,
        page_size=16,
        num_pages=num_pages,
        max_num_queued_reqs=2,
    )
    runner = FakeRunner(
        max_num_seqs=ROWS,
        max_num_batched_tokens=16,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=num_pages,
        page_size=16,
    )
    return EngineCore(runner, limits, CoreOptions(loop=loop))  # type: ignore[arg-type]


def clock_of_launches(core: EngineCore) -> Callable[[], float]:
    """Seconds are steps launched."""
    runner = core.runner
    assert isinstance(runner, FakeRunner)
    return lambda: float(sum(kind == "launch" for kind, _ in runner.trace))


def prompts(count: int, length: int) -> Sequence[tuple[int, ...]]:
    return [tuple((7 * row + i) % 97 for i in range(length)) for row in range(count)]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_decode_run_covers_exactly_the_steps_in_which_all_rows_decode(loop: str):
    core = make_core(loop=loop)
    task = DecodeTask(prompts=prompts(ROWS, 20), output_len=9, max_tokens=60)
    timed = run_decode(core, task, clock_of_launches(core))
    assert timed.num_steps == 8
    assert timed.num_tokens == ROWS * 8
    assert timed.elapsed_s == 8.0
    assert core.is_idle
    core.check_invariants()


def test_the_average_context_is_that_of_the_rows_in_the_window():
    core = make_core()
    task = DecodeTask(prompts=prompts(1, 20), output_len=4, max_tokens=60)
    # Two prompt steps give the first token; the next three tokens see 21, 22 and 23 of KV.
    assert run_decode(core, task, clock_of_launches(core)).context == 22.0


def test_a_pool_that_cannot_hold_all_rows_is_refused_and_not_measured():
    core = make_core(num_pages=8)
    task = DecodeTask(prompts=prompts(ROWS, 20), output_len=60, max_tokens=80)
    with pytest.raises(ConfigError, match="--concurrency"):
        run_decode(core, task, clock_of_launches(core))


def test_a_prefill_run_counts_the_prompts_tokens_until_the_last_one_is_read():
    core = make_core()
    timed = run_prefill(core, prompts(10, 8), clock_of_launches(core))
    assert timed.num_tokens == 80
    assert timed.elapsed_s == 5.0
    assert core.is_idle


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_prefill_run_counts_steps_in_which_no_prompt_ends(loop: str):
    core = make_core(loop=loop)
    timed = run_prefill(core, prompts(3, 40), clock_of_launches(core))
    assert timed.num_steps == timed.elapsed_s == 8
    profile = step_profile(timed, {})
    assert profile.step_ms == 1e3, "a step took longer than the clock says"


def op(name: str, calls: int, ms: float, read_bytes: int) -> OpTotals:
    return OpTotals(name=name, num_calls=calls, elapsed_s=ms / 1e3, read_bytes=read_bytes)


def test_a_step_profile_is_mean_time_times_calls_of_a_step():
    whole = (op("linear", 12, 60.0, 1200), op("next_token", 3, 30.0, 30), op("embed", 0, 0.0, 0))
    calls = calls_of_a_step(whole)
    assert calls == {"linear": 4, "next_token": 1}
    cut = (op("linear", 7, 14.0, 700), op("next_token", 2, 20.0, 20))
    timed = Timed(elapsed_s=0.04, num_tokens=2, num_steps=2, context=1.0, ops=cut)
    profile = step_profile(timed, calls)
    assert [(each.op, each.calls, each.ms) for each in profile.ops] == [
        ("next_token", 1, 10.0),
        ("linear", 4, 8.0),
    ]
    assert profile.step_ms == pytest.approx(20.0)
    assert profile.rest_ms == pytest.approx(2.0)
    assert profile.read_bytes == 10 + 400


def test_touched_experts_are_mean_bytes_times_calls_of_a_step_also_of_steps_covered_in_part():
    def timed(*ops: OpTotals) -> Timed:
        return Timed(elapsed_s=1.0, num_tokens=12, num_steps=12, context=3.0, ops=ops)

    whole = [op("next_token", 12, 1.0, 0), op("grouped_linear", 48, 1.0, 4800)]
    part = [op("next_token", 12, 1.0, 0), op("grouped_linear", 46, 1.0, 4600)]
    assert touched_bytes([timed(*whole)]) == 400.0
    assert touched_bytes([timed(*whole), timed(*part)]) == 400.0
    both = op("grouped_gated_linear", 48, 1.0, 9600)
    assert touched_bytes([timed(*whole, both)]) == 1200.0
    assert touched_bytes([timed(whole[0], op("linear", 48, 1.0, 4800))]) is None
    assert touched_bytes([timed()]) is None
