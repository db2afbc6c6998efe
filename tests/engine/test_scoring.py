"""A prompt is scored while it waits, and what is kept of it follows from the request alone."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.sequence import WaitReason
from cadenza.batch.step_cost import StepBound, StepCost, StepLoad
from cadenza.batch.step_schema import ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.engine.step_works import WorkOptions
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.events import Finished, Preparing, Started, Token
from cadenza.request import Request
from cadenza.scheduler.scoring_queue import ScoringQueue
from cadenza.sparse_prefill import PromptSpan
from cadenza.tenant import Tenant
from tests.engine.simulation import Record, run_requests
from tests.engine.solo import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.engine.sparse import (
    LIMITS,
    WINDOW,
    FakeScorer,
    asking,
    fake_of,
    kept_of,
    owed,
    request_of,
    scorer_of,
    scores_of,
    scoring_engine,
    tokens_of,
)

LENGTHS = (1, 65, 96, 200, 201, 333, 400)


def run(engine: EngineCore, *requests: Request, **options: Any) -> Record:
    return run_requests(engine, list(requests), **options)


def streams_of(record: Record) -> list[tuple[int, ...]]:
    return [record.token_ids(stream) for stream in record.streams]


def owed_all(requests: list[Request]) -> list[tuple[int, ...]]:
    return [owed(each, kept_of(each)).token_ids for each in requests]


def fake(engine_scorer: PromptScorerModel) -> FakeScorer:
    assert isinstance(engine_scorer.runner, FakeScorer)
    return engine_scorer.runner


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("budget", [5, 48, 512])
def test_streams_are_those_alone_however_prompts_are_scored_beside_others(
    budget: int, loop: str
) -> None:
    limits = replace(LIMITS, num_pages=33)
    cases = [asking(tokens_of(n, n), seed=n, max_tokens=60, ignore_eos=n % 2 == 0) for n in LENGTHS]
    plain = [request_of(tokens_of(60, n), None, seed=n, max_tokens=100) for n in range(3)]
    both = [*plain, *cases]
    engine = scoring_engine(limits, scorer_of(limits, budget), loop=loop, reserved_output=0.0)
    record = run(engine, *both, before_step=lambda _: engine.check_invariants())
    assert streams_of(record) == owed_all(both)
    assert engine.scheduler.work(ScoringQueue).counts.num_scored >= 4
    record.verify_nothing_is_held()


def test_several_prompts_are_rows_of_one_step() -> None:
    scorer = scorer_of(LIMITS)
    cases = [asking(tokens_of(n, n), seed=n) for n in (200, 300, 250)]
    record = run(scoring_engine(scorer=scorer), *cases)
    assert streams_of(record) == owed_all(cases)
    assert max(map(len, fake(scorer).rows)) >= 2


def test_a_running_sequence_takes_the_pages_of_a_scoring() -> None:
    limits = replace(LIMITS, num_pages=24)
    long = asking(tokens_of(300, 1), seed=1, max_tokens=8)
    short = request_of(tokens_of(16, 2), None, seed=2, max_tokens=300)
    engine = scoring_engine(limits, scorer_of(limits, 4), reserved_output=0.0)
    record = run(engine, short, long, before_step=lambda _: engine.check_invariants())
    assert streams_of(record) == owed_all([short, long])
    assert engine.scheduler.work(ScoringQueue).counts.num_preempted > 0
    assert engine.scheduler.num_preemptions == 0, "what runs is not preempted for what is scored"
    record.verify_nothing_is_held()


def test_a_scoring_can_be_preempted_at_every_step() -> None:
    asked = asking(tokens_of(300, 1), seed=1)
    (expected,) = owed_all([asked])
    num_steps, is_over = 0, False
    while not is_over:
        engine = scoring_engine(scorer=scorer_of(LIMITS, 100))
        engine.submit(asked)
        events = [event for _ in range(num_steps) for event in engine.step()]
        is_over = not engine.scheduler.work(ScoringQueue).give_up_pages() and num_steps > 0
        engine.check_invariants()
        while not engine.is_idle:
            events += engine.step()
        assert tuple(each.token_id for each in events if isinstance(each, Token)) == expected
        num_steps += 1
    assert num_steps > 10


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_request_can_be_cancelled_at_every_step_of_its_scoring(loop: str) -> None:
    other = request_of(tokens_of(40, 5), None, seed=3, max_tokens=60)
    expected = owed(other, None).token_ids
    num_steps, states = 0, set[str]()
    while True:
        engine = scoring_engine(loop=loop, scorer=scorer_of(LIMITS, 20))
        engine.submit(other)
        cancelled = engine.submit(asking(tokens_of(200, 1), n=2))
        events = [event for _ in range(num_steps) for event in engine.step()]
        is_over = any(isinstance(each, Finished) and each.request_id == 1 for each in events)
        if is_over:
            break
        states |= {
            f"{each.status} {each.awaits_kept} {bool(engine.scheduler.work(ScoringQueue).holders)}"
            for each in engine.scheduler.sequences
            if each.request_id == 1
        }
        engine.cancel(cancelled)
        engine.check_invariants()
        assert not engine.scheduler.work(ScoringQueue).holders
        while not engine.is_idle:
            events += engine.step()
            engine.check_invariants()
        stream = [each for each in events if isinstance(each, Token) and each.request_id == 0]
        assert tuple(each.token_id for each in stream) == expected
        assert engine.scheduler.kv_cache.pool.counts().live == 0
        num_steps += 1
    assert len(states) >= 3


def test_a_sample_that_hangs_up_leaves_the_scoring_to_the_others() -> None:
    engine = scoring_engine()
    request = asking(tokens_of(200, 1), n=2)
    request_id = engine.submit(request)
    engine.step()
    engine.cancel(request_id, 0)
    events = []
    while not engine.is_idle:
        events += engine.step()
        engine.check_invariants()
    (started,) = [each for each in events if isinstance(each, Started)]
    kept = kept_of(request)
    assert kept is not None
    assert started.kept == kept.mask


def test_equal_prompts_are_scored_once_at_the_same_time_and_later() -> None:
    scorer = scorer_of(LIMITS)
    engine = scoring_engine(scorer=scorer)
    prompt = tokens_of(300, 1)
    cases = [asking(prompt, seed=1, n=1), asking(prompt, keep=0.6, seed=2)]
    record = run(engine, *cases)
    assert streams_of(record) == owed_all(cases)
    num_tokens = engine.scheduler.work(ScoringQueue).counts.num_tokens
    assert num_tokens == 307
    later = asking(prompt, keep=0.8, forced=(PromptSpan(100, 150),), seed=4)
    assert streams_of(run(engine, later)) == owed_all([later])
    salted = replace(later, cache_salt="another tenant's")
    assert streams_of(run(engine, salted)) == owed_all([later])
    assert engine.scheduler.work(ScoringQueue).counts.num_tokens == 2 * num_tokens, (
        "salts share nothing"
    )


def prompt_that_ends_at_once() -> tuple[int, ...]:
    """One behind which the fake draft draws an end of sequence; what it would keep without one
    differs."""
    for seed in range(2000):
        prompt = tokens_of(400, seed)
        first_only = scores_of(prompt, frozenset(range(VOCAB_SIZE)))
        ends = scores_of(prompt, EOS_TOKEN_IDS) == first_only
        asked = [asking(prompt, ignore_eos=each) for each in (False, True)]
        if ends and kept_of(asked[0]) != kept_of(asked[1]):
            return prompt
    raise AssertionError("no prompt ends at once")


def test_a_look_ahead_that_ends_at_once_leaves_the_last_token_to_score() -> None:
    prompt = prompt_that_ends_at_once()
    cases = [asking(prompt, ignore_eos=each, seed=3) for each in (False, True)]
    for loop in ("plain", "overlap"):
        assert streams_of(run(scoring_engine(loop=loop), *cases)) == owed_all(cases)


@pytest.mark.parametrize(
    "request_",
    [
        asking(tokens_of(201, 1), keep=1.0, seed=1),
        asking(tokens_of(201, 1), keep=0.01, seed=1),
        asking(tokens_of(201, 1), keep=0.3, forced=(PromptSpan(0, 150),), seed=1),
    ],
)
def test_nothing_is_scored_where_no_score_decides_what_is_kept(request_: Request) -> None:
    engine = scoring_engine()
    record = run(engine, request_)
    assert streams_of(record) == owed_all([request_])
    assert engine.scheduler.work(ScoringQueue).counts.num_tokens == 0


def test_with_everything_kept_the_stream_is_that_of_the_whole_prompt() -> None:
    prompt = tokens_of(201, 1)
    whole = request_of(prompt, None, seed=9)
    for keep in (1.0, 0.999):
        asked = asking(prompt, keep=keep, seed=9)
        assert streams_of(run(scoring_engine(), asked)) == [owed(whole, None).token_ids]


def started_of(engine: EngineCore, *requests: Request) -> dict[int, Started]:
    """By the place of the request."""
    ids = [engine.submit(each) for each in requests]
    found: list[Started] = []
    while not engine.is_idle:
        found += [each for each in engine.step() if isinstance(each, Started)]
        engine.check_invariants()
    return {ids.index(each.request_id): each for each in found}


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_failed_step_is_retried_and_what_fails_alone_is_computed_whole(loop: str) -> None:
    scorer = scorer_of(LIMITS, fails_at={250: 2, 301: 1})
    engine = scoring_engine(scorer=scorer, loop=loop)
    cases = [asking(tokens_of(n, n), seed=n) for n in (200, 250)]
    started = started_of(engine, *cases, asking(tokens_of(200, 1)))
    later = started_of(engine, asking(tokens_of(301, 1)))
    assert [started[k].whole_because for k in range(3)] == [None, "scoring_failed", None]
    assert started[1].kept is None
    assert started[0].kept is not None
    assert later[0].kept is not None
    assert engine.scheduler.work(ScoringQueue).counts.num_failed == 1
    assert engine.loop.num_failed_steps == 0, "the target's steps did not fail"


def test_scores_that_are_not_finite_are_a_failed_scoring() -> None:
    scorer = scorer_of(LIMITS, nan_at=frozenset({250}))
    engine = scoring_engine(scorer=scorer)
    cases = [asking(tokens_of(n, n), seed=n) for n in (250, 200)]
    record = run(engine, *cases)
    whole = replace(cases[0], sparse_prefill=None)
    assert streams_of(record) == owed_all([whole, cases[1]])
    assert engine.scheduler.work(ScoringQueue).counts.num_failed == 1


def test_a_stream_whose_scoring_failed_goes_on_whole_in_another_engine() -> None:
    asked = asking(tokens_of(250, 1), seed=6)
    engine = scoring_engine(scorer=scorer_of(LIMITS, nan_at=frozenset({250})))
    (started,) = started_of(engine, asked).values()
    expected = owed(replace(asked, sparse_prefill=None), None).token_ids
    second = scoring_engine()
    resumption = Resumption(
        samples=(ResumedSample(sample=0, token_ids=expected[:4]),),
        whole_reason=started.whole_because,
    )
    second.resume(0, asked, resumption)
    events = []
    while not second.is_idle:
        events += second.step()
    assert tuple(each.token_id for each in events if isinstance(each, Token)) == expected[4:]


def test_cold_computes_the_whole_prompt_where_more_than_its_head_is_cached() -> None:
    prompt = tokens_of(200, 1)
    engine = scoring_engine()
    run(engine, request_of(prompt[:128], None))
    cold = {"when": "cold", "cold_from": 64}
    asked = asking(prompt, sparse=cold, seed=1)
    again = asking((*prompt[:64], *tokens_of(136, 2)), sparse=cold, seed=1)
    started = started_of(engine, asked, again)
    assert started[0].whole_because == "cached"
    assert started[1].whole_because is None
    assert started[1].kept is not None


def test_a_failed_step_of_the_target_begins_scorings_again() -> None:
    engine = scoring_engine()
    plain = request_of(tokens_of(30, 1), None, seed=1, max_tokens=40)
    asked = asking(tokens_of(300, 1), seed=2)
    ids = [engine.submit(plain), engine.submit(asked)]
    events = [event for _ in range(4) for event in engine.step()]
    assert engine.scheduler.work(ScoringQueue).holders
    engine.loop._recover(engine.loop.in_flight.popleft().batch)
    engine.check_invariants()
    while not engine.is_idle:
        events += engine.step()
        engine.check_invariants()
    for request_id, expected in zip(ids, owed_all([plain, asked]), strict=True):
        tokens = [e for e in events if isinstance(e, Token) and e.request_id == request_id]
        assert tuple(each.token_id for each in tokens) == expected


def test_a_request_whose_scoring_ends_engines_is_known_by_it() -> None:
    books = OpenRequests(RequestTimeouts(), lambda: 0.0)
    asked, other = asking(tokens_of(300, 1)), asking(tokens_of(200, 2))
    ids = [books.accept(each, LIMITS) for each in (asked, other)]
    for number in (1, 2):
        engine = scoring_engine(scorer=scorer_of(LIMITS, 16))
        engine.enqueue(ids[0], asked)
        told: list[Started | Preparing] = []
        for _ in range(5):
            books.record(engine.step(told.extend))
        assert told == [Preparing(request_id=ids[0])], "once, and in no step's events"
        books.record(told)
        books.lose_engine(0.0)
        assert [books.num_losses(each) for each in ids] == [number, 0]


def test_a_flood_of_short_prompts_does_not_keep_a_scoring_from_its_pages() -> None:
    limits = replace(LIMITS, num_pages=26, max_num_seqs=4)
    engine = scoring_engine(limits)
    flood = [request_of(tokens_of(60, n), None, seed=n, max_tokens=60) for n in range(40)]
    long = asking(tokens_of(330, 1), seed=1)
    ids = [engine.submit(each) for each in [*flood[:6], long, *flood[6:]]]
    ends: list[int] = []
    while not engine.is_idle:
        ends += [each.request_id for each in engine.step() if isinstance(each, Finished)]
        engine.check_invariants()
    assert ends.index(ids[6]) < 15


def test_a_scoring_leaves_its_pages_to_who_is_ready_to_start_before_it() -> None:
    limits = replace(LIMITS, num_pages=30)
    engine = scoring_engine(limits, scorer_of(limits, 4), reserved_output=1.0)
    running = engine.submit(request_of(tokens_of(200, 1), None, max_tokens=10))
    engine.step()
    engine.submit(request_of(tokens_of(300, 2), None))
    engine.submit(asking(tokens_of(200, 3)))
    places: dict[tuple[type, int], int] = {}
    for number in range(400):
        for event in engine.step():
            places.setdefault((type(event), event.request_id), number)
        engine.check_invariants()
    ended, began = places[Finished, running], places[Started, running + 1]
    assert began <= ended + 2, "it waits for what runs alone"
    assert places[Started, running + 2] > began


def test_a_scoring_beyond_its_tenants_quota_holds_back_only_those_behind_it() -> None:
    engine = scoring_engine(replace(LIMITS, max_num_seqs=8))
    crowded = Tenant(name="crowded", page_share=0.25)
    first, *shorts = [
        replace(request_of(tokens_of(count, n), None, max_tokens=20), tenant=crowded)
        for n, count in enumerate((180, 10, 11, 12))
    ]
    engine.submit(first)
    for _ in range(4):
        engine.step()
    asked = replace(asking(tokens_of(330, 1)), tenant=crowded)
    others = request_of(tokens_of(13, 9), None, max_tokens=20)
    before = [engine.submit(each) for each in shorts[:2]]
    scored, behind, other = [engine.submit(each) for each in (asked, shorts[2], others)]
    engine.step()
    scheduler = engine.scheduler
    reasons = {each.request_id: scheduler.why_waits(each) for each in scheduler.waiting}
    assert reasons == {scored: WaitReason.QUOTA, behind: WaitReason.QUOTA}
    assert {each.request_id for each in scheduler.running} >= {*before, other}


COST = StepCost(fixed_ms=5.0, token_ms=0.25, logit_ms=0.2, key_ms=0.00005)
DRAFT_COST = StepCost(fixed_ms=6.0, token_ms=0.2, logit_ms=0.2, key_ms=0.0002)
BOUND_MS = 50.0


def test_the_tenant_whose_prompt_is_scored_pays_for_it() -> None:
    paid: list[float] = []
    prompt = tokens_of(300, 1)
    for kept in (None, kept_of(asking(prompt))):
        engine = scoring_engine(
            scorer=replace(scorer_of(LIMITS), cost=DRAFT_COST),
            step_bound=StepBound(max_ms=BOUND_MS, cost=COST),
        )
        own = asking(prompt) if kept is None else request_of(prompt, kept)
        other = request_of(tokens_of(20, 2), None, max_tokens=30)
        engine.submit(replace(other, tenant=Tenant(name="other")))
        engine.submit(replace(own, tenant=Tenant(name="own")))
        (sequence,) = [each for each in engine.scheduler.waiting if each.request_id == 1]
        while sequence.num_generated_tokens < 1:
            engine.step()
        paid.append(engine.scheduler.turns.fair_share.counter_of(sequence))
    assert paid[0] - paid[1] > 300 * DRAFT_COST.token_ms


@dataclass(slots=True)
class Clock:
    """Advanced by what a step truly costs, when it is read."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def timed(kind: type[FakeRunner], cost: StepCost, clock: Clock) -> type[FakeRunner]:
    """The runner, whose steps take time one after the other."""

    class Timed(kind):  # type: ignore[misc, valid-type]
        def launch(self, inputs: ModelInputs) -> FakeStepHandle:
            handle = super().launch(inputs)
            counts, lens = np.diff(inputs.rows.query_starts), inputs.rows.kv_lens
            keys = counts * (lens - counts) + counts * (counts + 1) // 2
            load = StepLoad(
                num_tokens=inputs.num_tokens, num_logits=inputs.num_logits, num_keys=int(keys.sum())
            )

            def read() -> None:
                clock.now_s += cost.predict_ms(load) / 1000

            return FakeStepHandle(handle.output, read)

    return Timed


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_steps_of_others_stay_within_the_bound_while_four_long_prompts_are_scored(
    loop: str,
) -> None:
    limits = replace(
        LIMITS, max_num_seqs=10, max_num_batched_tokens=256, max_model_len=2048, num_pages=1000
    )
    clock = Clock()
    model = scorer_of(limits, 512, kind=timed(FakeScorer, DRAFT_COST, clock))
    engine = EngineCore(
        fake_of(limits, kind=timed(FakeRunner, COST, clock)),
        limits,
        CoreOptions(
            step_bound=StepBound(max_ms=BOUND_MS, cost=COST),
            works=WorkOptions(prompt_scorer=replace(model, cost=DRAFT_COST)),
            clock=clock,
            loop=loop,
            window=WINDOW,
        ),
    )
    plain = [request_of(tokens_of(20, n), None, seed=n, max_tokens=120) for n in range(4)]
    ids = [engine.submit(each) for each in plain]
    asked = [asking(tokens_of(1000, n), keep=0.3, seed=n) for n in range(4)]
    came: dict[int, list[float]] = {each: [] for each in ids}
    for number in range(1000):
        if number == 10:
            ids += [engine.submit(each) for each in asked]
        if engine.is_idle:
            break
        for event in engine.step():
            if isinstance(event, Token) and event.request_id in came:
                came[event.request_id].append(clock.now_s)
        engine.check_invariants()
    gaps = [b - a for times in came.values() for a, b in pairwise(times)]
    # Shares do not count the logit row behind a prompt's last token.
    assert max(gaps) * 1000 <= BOUND_MS + 2 * COST.logit_ms
    counts = engine.scheduler.work(ScoringQueue).counts
    assert counts.num_scored == 4
    num_steps = len(fake(model).rows)
    assert counts.num_tokens / num_steps > 20, "the time that is left is used"
    assert counts.scoring_ms > 0
