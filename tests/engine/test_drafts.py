"""How many drafts are made, by whom, and what they save: on the token-storing runner."""

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.drafting.drafts import (
    FIRST_ACCEPTANCE,
    PROBE_EVERY,
    Drafting,
    SharedAcceptance,
    drafting_of,
)
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import LEAST_CATCH_UP, MAX_FAILURES, MORE_TOKENS, DraftModel
from cadenza.errors import InvalidRequestError
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.draft_costs import DecodeCost
from cadenza.scheduler.draft_plan import MIN_RATIO, DraftChance, plan_drafts
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from tests.engine.drafting import LIMITS, draft_model_of, fake_of
from tests.engine.simulation import VOCAB_SIZE, ObservedRunner, Record, run_requests
from tests.engine.solo import solo_stream

SERVED = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
CHEAP = StepCost(fixed_ms=0.1, token_ms=0.01, logit_ms=0.01, key_ms=0.0)
DEAR = StepCost(fixed_ms=10.0, token_ms=0.01, logit_ms=0.01, key_ms=0.0)


@pytest.mark.parametrize(
    ("speculative", "prediction", "config", "most"),
    [
        (None, (), None, None),
        (None, (), SERVED, 4),
        (True, (), None, 5),
        (True, (), SERVED, 4),
        (False, (), SERVED, None),
        (False, (1, 2), SERVED, None),
        (2, (), None, 2),
        (2, (), SERVED, 2),
        (9, (), SERVED, 4),
        (9, (), None, 9),
        (None, (1, 2), None, MAX_SPECULATIVE_TOKENS),
        (None, (1, 2), SERVED, 4),
        (3, (1, 2), None, 3),
    ],
)
def test_a_request_chooses_its_drafts(
    speculative: bool | int | None,
    prediction: tuple[int, ...],
    config: SpeculativeConfig | None,
    most: int | None,
) -> None:
    params = SamplingParams(speculative=speculative)
    request = Request(prompt_token_ids=(1,), params=params, prediction=prediction)
    drafting = drafting_of(request, config)
    assert (None if drafting is None else drafting.most) == most
    if drafting is not None:
        assert drafting.is_asked == (speculative is not None or bool(prediction))
        assert drafting.group == ("ngram", drafting.is_asked)


def test_a_number_of_drafts_may_be_given_by_its_name() -> None:
    named = SamplingParams(speculative={"num_speculative_tokens": 3})
    assert named == SamplingParams(speculative=3)
    for wrong in (0, 17, 1.5, "on", {"num_drafts": 3}, {"num_speculative_tokens": True}):
        with pytest.raises(InvalidRequestError, match="num_speculative_tokens"):
            SamplingParams(speculative=wrong)  # type: ignore[arg-type]


def predicted(seed: int, *, error: int = 0, speculative: bool | None = None) -> Request:
    """A request and its own stream as its prediction, with every `error`-th token wrong."""
    prompt = tuple(range(seed, seed + 9))
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True, speculative=speculative
    )
    request = Request(prompt_token_ids=prompt, params=params)
    stream = solo_stream(request, seed, len(prompt) + 60).token_ids
    wrong = [
        (token_id + 1) % VOCAB_SIZE if error and place % error == 0 else token_id
        for place, token_id in enumerate(stream, 1)
    ]
    return Request(prompt_token_ids=prompt, params=params, prediction=tuple(wrong))


def test_rows_with_and_without_predictions_share_steps_and_count_their_own_drafts() -> None:
    engine = EngineCore(fake_of(), LIMITS)
    requests = [predicted(1), predicted(2, error=5), predicted(3, error=1)]
    requests.append(predicted(4, speculative=False))
    record = run_requests(engine, requests)
    record.verify()
    accepted, rejected = [0] * 4, [0] * 4
    for (request_id, _), tokens in record.streams.items():
        accepted[request_id] = sum(token.is_draft for token in tokens)
        rejected[request_id] = sum(token.num_rejected_drafts for token in tokens)
    counts = engine.draft_counts
    assert sum(accepted) == counts.num_accepted_tokens
    assert sum(rejected) == counts.num_draft_tokens - counts.num_accepted_tokens
    assert accepted[0] > 50
    assert 0 < accepted[1] < accepted[0]
    assert accepted[2] == 0
    assert accepted[3] == rejected[3] == 0
    assert record.num_steps < 75, "a prediction saves no step"


def test_a_backend_that_verifies_no_drafts_refuses_what_asks_for_them() -> None:
    class Plain(FakeRunner):
        capabilities = frozenset({"logprobs"})  # type: ignore[assignment]

    engine = EngineCore(fake_of(LIMITS, Plain), LIMITS)
    asking = {"speculative": predicted(1, speculative=True), "prediction": predicted(1)}
    for name, request in asking.items():
        with pytest.raises(InvalidRequestError, match=rf"{name} is not supported") as refused:
            engine.submit(request)
        assert refused.value.param == name
    run_requests(engine, [Request(prompt_token_ids=(1,), params=SamplingParams(speculative=False))])


@pytest.mark.parametrize("prediction", [(VOCAB_SIZE,), (-1,), (1,) * 101])
def test_a_prediction_that_cannot_be_right_is_refused(prediction: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="prediction") as refused:
        EngineCore(fake_of(), LIMITS).submit(Request(prompt_token_ids=(1,), prediction=prediction))
    assert refused.value.param == "prediction"


@pytest.mark.parametrize(("ms_of_token", "least", "most"), [(0.5, 200, 240), (12.0, 2, 30)])
def test_drafts_are_made_as_far_as_measured_steps_say_that_they_pay(
    ms_of_token: float, least: int, most: int
) -> None:
    """They are foreseen to take 3 ms, a step without them 10; all of 240 would be accepted."""
    now_s = 0.0

    class Timed(FakeRunner):
        def launch(self, inputs: ModelInputs) -> FakeStepHandle:
            step_s = (10.0 + ms_of_token * (inputs.num_tokens - 1)) / 1000

            def read() -> None:
                nonlocal now_s
                now_s += step_s

            return FakeStepHandle(super().launch(inputs).output, read)

    options = CoreOptions(
        clock=lambda: now_s,
        step_cost=StepCost(fixed_ms=7.0, token_ms=2.0, logit_ms=1.0, key_ms=1e-9),
    )
    engine = EngineCore(fake_of(LIMITS, Timed), LIMITS, options)
    for start in range(1, 5):
        run_requests(engine, [predicted(start)])
    assert least <= engine.draft_counts.num_draft_tokens <= most


def engine_with(
    draft: DraftModel | FakeRunner,
    *,
    cost: StepCost | None = None,
    target: FakeRunner | None = None,
    step_cost: StepCost | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineCore:
    model = draft
    if isinstance(model, FakeRunner):
        model = DraftModel(runner=model, limits=LIMITS, shares_kv=False, cost=cost)
    method = "mtp" if model.reads_hidden else "draft_model"
    config = SpeculativeConfig(
        method=method, model=None if model.reads_hidden else "small", num_speculative_tokens=4
    )
    options = CoreOptions(speculation=config, draft_model=model, step_cost=step_cost, clock=clock)
    return EngineCore(target or fake_of(), LIMITS, options)


def ask(engine: EngineCore, *sizes: int, **params: Any) -> Record:
    """Runs requests with prompts of these sizes."""
    fields = {"max_tokens": 60, "ignore_eos": True, **params}
    requests = [
        Request(
            prompt_token_ids=tuple(range(seed, seed + size)),
            params=SamplingParams(seed=seed, **fields),
        )
        for seed, size in enumerate(sizes)
    ]
    record = run_requests(engine, requests)
    record.verify()
    return record


def test_accepted_drafts_of_a_second_model_save_steps() -> None:
    engine = engine_with(fake_of())
    assert ask(engine, 9, 9, 9).num_steps < 30
    counts = engine.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 120


def test_a_second_model_computes_little_of_a_prompt_before_more_was_measured() -> None:
    """Its steps are taken to cost next to nothing, which may be wrong."""
    sizes: list[int] = []

    class Noted(FakeRunner):
        def launch(self, inputs: ModelInputs) -> FakeStepHandle:
            sizes.append(inputs.num_tokens)
            return super().launch(inputs)

    engine = engine_with(fake_of(LIMITS, Noted), cost=CHEAP, step_cost=DEAR, clock=float)
    sizes.clear()
    ask(engine, 80, max_tokens=20)
    most = list(accumulate(sizes, max))
    assert most[0] == LEAST_CATCH_UP + 1
    assert max(most) > MORE_TOKENS * LEAST_CATCH_UP
    assert all(after <= MORE_TOKENS * before + 1 for before, after in pairwise(most))
    assert engine.draft_counts.num_accepted_tokens > 0


def test_what_a_second_model_takes_for_prompts_is_believed_once_it_was_measured() -> None:
    """A token of one is taken to cost a thousandth of a step, and costs half a step. Drafts behind
    short prompts have saved enough to compute long ones."""
    now_s, sizes = 0.0, list[int]()

    class Timed(FakeRunner):
        def launch(self, inputs: ModelInputs) -> FakeStepHandle:
            count, is_long = inputs.num_tokens, inputs.num_tokens > LEAST_CATCH_UP
            if self is second and is_long:
                sizes.append(count)

            def read() -> None:
                nonlocal now_s
                now_s += 0.01 if self is not second else 0.005 * count if is_long else 1e-4

            return FakeStepHandle(super().launch(inputs).output, read)

    target, second = fake_of(LIMITS, Timed), fake_of(LIMITS, Timed)
    engine = engine_with(second, cost=CHEAP, target=target, step_cost=DEAR, clock=lambda: now_s)
    for size in (3, 4, 5):
        ask(engine, size, max_tokens=80)
    sizes.clear()
    for size in range(60, 80):
        ask(engine, size, max_tokens=20)
    assert len(sizes) == 1


def test_a_request_without_drafts_runs_beside_others() -> None:
    engine = engine_with(fake_of())
    params = {"max_tokens": 60, "ignore_eos": True}
    requests = [
        Request(prompt_token_ids=(at, 2, 3), params=SamplingParams(speculative=wants, **params))
        for at, wants in enumerate([None, None, False])
    ]
    record = run_requests(engine, requests)
    record.verify()
    drafted = [sum(token.is_draft for token in tokens) for tokens in record.streams.values()]
    assert min(drafted[:2]) > 40
    assert drafted[2] == 0


def test_a_prefix_that_is_cached_is_not_computed_again_by_the_draft_model() -> None:
    draft = fake_of(LIMITS, ObservedRunner)
    assert isinstance(draft, ObservedRunner)
    engine = engine_with(draft)
    num_tokens: list[int] = []
    for _ in range(2):
        before = draft.num_launched_tokens
        ask(engine, 80, temperature=0.0, max_tokens=12)
        num_tokens.append(draft.num_launched_tokens - before)
    assert num_tokens[0] > 80
    assert num_tokens[1] <= num_tokens[0] - 64


def test_drafts_that_cost_more_than_they_save_are_not_made() -> None:
    draft = fake_of()
    engine = engine_with(draft, cost=DEAR, step_cost=CHEAP)
    ask(engine, 9, 9, 9)
    assert engine.draft_counts.num_drafts == 0
    assert draft.trace == []
    engine = engine_with(fake_of(), cost=CHEAP, step_cost=DEAR)
    ask(engine, 9, 9, 9)
    assert engine.draft_counts.num_drafts > 0


class Breaks(FakeRunner):
    """Each of its steps fails."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        raise RuntimeError("no memory")


def test_a_draft_model_that_fails_costs_drafts_and_no_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with(fake_of(LIMITS, Breaks))
    ask(engine, 9, 9, 9)
    assert engine.draft_counts.num_drafts == 0
    assert engine.loop.num_failed_steps == 0
    assert caplog.text.count("a step of the draft model failed") == MAX_FAILURES


def test_closing_the_engine_closes_the_draft_model() -> None:
    draft = fake_of()
    engine_with(draft).close()
    assert draft.stored(0, 1) == []


def mtp_drafts(*sizes: int, error: float = 0.0) -> tuple[int, int, int]:
    """Drafts of an MTP layer behind prompts of these sizes, how many were accepted, and steps."""
    target = fake_of()
    engine = engine_with(draft_model_of("mtp layer", target, LIMITS, error=error), target=target)
    record = ask(engine, *sizes)
    counts = engine.draft_counts
    return counts.num_draft_tokens, counts.num_accepted_tokens, record.num_steps


def test_a_prompt_of_one_token_is_drafted_behind_its_first_answer() -> None:
    num_drafts, num_accepted, num_steps = mtp_drafts(1)
    assert num_drafts == num_accepted
    assert num_steps < 16


def test_an_mtp_layer_that_errs_is_right_again_behind_its_errors() -> None:
    num_drafts, num_accepted, _ = mtp_drafts(9, 1, 30, error=0.2)
    assert num_drafts > num_accepted > 0.4 * num_drafts


def test_a_second_model_that_lacks_the_first_token_is_rejected() -> None:
    """The negative control: a second model of its own does not see the first token here."""
    model = DraftModel(runner=fake_of(), limits=LIMITS, shares_kv=False, reads_hidden=True)
    engine = engine_with(model)
    ask(engine, 9, 1, 30)
    counts = engine.draft_counts
    assert counts.num_draft_tokens > 20 > counts.num_accepted_tokens


def chances(*acceptances: float, most: int = 5) -> list[DraftChance]:
    return [DraftChance(acceptance=each, most=most, num_keys=10) for each in acceptances]


def target_cost(num_rows: int) -> DecodeCost:
    return DecodeCost.linear(5.0 + 0.2 * num_rows, 0.2)


QUARTER = StepCost(fixed_ms=1.2, token_ms=0.03, logit_ms=0.03, key_ms=0.0)


def test_more_is_drafted_where_more_is_accepted() -> None:
    counts = [
        plan_drafts(chances(each), 1, target_cost(1), QUARTER).counts[0]
        for each in (0.1, 0.5, 0.8, 0.95, 1.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 5


def test_a_plan_is_the_best_of_all_equal_numbers_of_drafts() -> None:
    for acceptance in (0.3, 0.6, 0.8, 0.93):
        for rows in (1, 2, 4, 8):
            plan = plan_drafts(chances(*[acceptance] * rows), rows, target_cost(rows), QUARTER)
            rates = [expected_rate(acceptance, rows, count) for count in range(6)]
            best = max(rates)
            if best < MIN_RATIO * rates[0]:
                assert plan.counts == [0] * rows
            else:
                assert plan.rate == pytest.approx(best)
                assert plan.counts == [rates.index(best)] * rows
                assert plan.saved_ms == pytest.approx(1 / rates[0] - 1 / best)


def expected_rate(acceptance: float, rows: int, count: int) -> float:
    tokens = rows * sum(acceptance**depth for depth in range(count + 1))
    ms = 5.0 + rows * 0.2 + count * (rows * 0.2 + 1.2 + rows * 0.06)
    return tokens / ms


def test_a_sequence_that_accepts_little_does_not_draft_beside_one_that_accepts_much() -> None:
    plan = plan_drafts(chances(0.95, 0.02), 2, target_cost(2), QUARTER)
    assert plan.counts[0] > 1
    assert plan.counts[1] == 0


def test_sequences_start_from_what_others_have_met_and_some_do_not() -> None:
    shared = SharedAcceptance()
    for _ in range(1000):
        shared.learn(is_accepted=False)
    starts = [shared.start() for _ in range(2 * PROBE_EVERY)]
    assert sum(start > 0.5 for start in starts) == 2
    assert min(starts) < 0.01


def test_a_request_that_asks_starts_from_what_those_that_ask_have_met() -> None:
    shared = {False: SharedAcceptance(), True: SharedAcceptance()}
    config = SpeculativeConfig(method="quantised")

    def started(speculative: bool | None) -> Drafting:
        params = SamplingParams(speculative=speculative)
        found = drafting_of(Request(prompt_token_ids=(1,), params=params), config, shared)
        assert found is not None
        return found

    silent = started(None)
    for _ in range(1000):
        silent.learn(2, 1, 0)
    assert started(None).acceptance < 0.01
    asking = started(True)
    assert (asking.acceptance, asking.group) == (FIRST_ACCEPTANCE, ("model", True))
    for _ in range(1000):
        asking.learn(2, 1, 0)
    assert started(True).acceptance < 0.01
