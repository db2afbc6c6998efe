"""What an engine reports for routes: its queue in seconds, and prefixes once they are computed."""

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.request_ids import ids_of
from cadenza.engine.route_report import (
    UNMEASURED_TOKEN_S,
    RouteReport,
    RouteReporter,
    Seen,
    forecast_queue,
)
from cadenza.kv.page_keys import Content, PageKeys, short_keys, split_keys
from cadenza.request import Request, SamplingParams

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=16,
    num_pages=32,
    max_num_queued_reqs=30,
)
COST = StepCost(fixed_ms=10.0, token_ms=1.0, logit_ms=2.0, key_ms=1e-9)
SECRET = b"of a group"


def core_of(cost: StepCost | None = COST) -> EngineCore:
    runner = FakeRunner(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
    )
    return EngineCore(runner, LIMITS, CoreOptions(step_cost=cost, secret=SECRET, loop="plain"))


def prompt(first: int, count: int, max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=tuple(range(first, first + count)), params=params)


def keys_of(request: Request) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    PageKeys(page_size=16, secret=SECRET).extend(keys, Content(request.prompt_token_ids))
    return short_keys(keys)


def test_a_queue_takes_the_time_of_its_uncached_prompts_beside_the_rows_that_decode() -> None:
    core = core_of()
    idle = forecast_queue(core.scheduler)
    assert (idle.queued_s, idle.prompt_token_s) == (0.0, pytest.approx((10 / 64 + 1) / 1000))
    core.submit(prompt(0, 40, max_tokens=9))
    waiting = forecast_queue(core.scheduler)
    assert waiting.queued_s == pytest.approx(40 * idle.prompt_token_s)
    core.step()
    decoding = forecast_queue(core.scheduler)
    assert decoding.queued_s == 0.0
    cost = core.scheduler.times.cost  # it has learned from the step
    assert cost is not None
    beside_ms = cost.predict_ms(StepLoad().plus(40, 1, 1)) / 63
    assert decoding.prompt_token_s == pytest.approx((beside_ms + cost.token_ms) / 1000)
    core.submit(prompt(0, 48))
    assert forecast_queue(core.scheduler).num_tokens == 16


def test_without_known_costs_a_queue_is_a_guess() -> None:
    core = core_of(cost=None)
    core.submit(prompt(0, 40))
    assert forecast_queue(core.scheduler) == (40, UNMEASURED_TOKEN_S, False)


def held(report: RouteReport) -> tuple[list[bytes], list[bytes]]:
    assert report.held is not None
    assert report.held.secret == SECRET
    return split_keys(report.held.added), split_keys(report.held.removed)


def test_prefixes_are_told_once_they_are_computed_and_at_most_each_second() -> None:
    core = core_of()
    first, second = prompt(0, 40), prompt(16, 80)
    core.submit(first)
    core.step()
    reporter = RouteReporter(core)
    reporter.received(0)
    report = reporter.report(1.0)
    assert (report.seen, report.queued_s) == ({0: Seen(newest_id=0, first_pending_id=1)}, 0.0)
    assert held(report) == ([*keys_of(first)], [])
    core.submit(second)
    reporter.received(1)
    core.step()
    assert reporter.report(1.9).held is None
    report = reporter.report(2.0)
    assert report.seen == {0: Seen(newest_id=1, first_pending_id=1)}
    assert held(report) == ([], [])
    core.step()
    report = reporter.report(3.0)
    assert report.seen == {0: Seen(newest_id=1, first_pending_id=2)}
    assert held(report) == ([*keys_of(second)], [])
    core.scheduler.kv_cache.forget_all()
    gone = held(reporter.report(4.0))
    assert (gone[0], {*gone[1]}) == ([], {*keys_of(first), *keys_of(second)})


def test_each_front_end_is_told_of_its_own_requests() -> None:
    core = core_of()
    reporter = RouteReporter(core)
    for front in (1, 3):
        core.enqueue(next(ids_of(front)), prompt(front, 40))
        reporter.received(next(ids_of(front)))
    own = {front: next(ids_of(front)) for front in (1, 3)}
    assert reporter.report(0.0).seen == {
        front: Seen(newest_id=each, first_pending_id=each) for front, each in own.items()
    }
    while core.has_requests:
        core.step()
    assert reporter.report(1.0).seen == {
        front: Seen(newest_id=each, first_pending_id=each + 1) for front, each in own.items()
    }
