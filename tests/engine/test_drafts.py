"""How many drafts are made, by whom, and what they save; what constraints are asked for them."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.drafting.drafts import (
    Drafting,
    Lookahead,
)
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import LEAST_CATCH_UP, MAX_FAILURES, MORE_TOKENS, DraftModel
from cadenza.engine.new_sequences import Compiling
from cadenza.errors import InvalidRequestError
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.step_budget import MAX_ROW_MASKS, MAX_STEP_MASKS
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from cadenza.structured import Constraint, ConstraintSpec
from tests.engine.drafting import LIMITS, AlwaysDrafts, Foresight, draft_model_of, fake_of
from tests.engine.hashed_constraint import Compiled, HashedConstraint
from tests.engine.simulation import (
    VOCAB_SIZE,
    ObservedRunner,
    Parts,
    Record,
    make_engine,
    run_requests,
)
from tests.engine.solo import solo_stream

CHEAP = StepCost(fixed_ms=0.1, token_ms=0.01, logit_ms=0.01, key_ms=0.0)


DEAR = StepCost(fixed_ms=10.0, token_ms=0.01, logit_ms=0.01, key_ms=0.0)


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


@dataclass(eq=False)
class Allowing:
    """A constraint that allows everything, and what was asked of it."""

    asked: list[str]
    accepted: int = 0
    ends_after: int = 1000
    fails_after: int = 1000

    @property
    def is_complete(self) -> bool:
        return self.accepted >= self.ends_after

    @property
    def has_failed(self) -> bool:
        return self.accepted > self.fails_after

    def accept(self, token_id: int) -> None:
        self.asked.append(f"accept {token_id}")
        self.accepted += 1

    def allowed(self) -> bytes:
        self.asked.append("allowed")
        return bytes([0b0111_1111, self.accepted])

    def forced(self) -> list[int]:
        return []

    def fork(self) -> "Allowing":
        return Allowing([], self.accepted, self.ends_after, self.fails_after)


def test_looking_ahead_leaves_the_constraint_as_it_was_but_for_its_mask() -> None:
    asked: list[str] = []
    ahead = Lookahead(Allowing(asked))
    assert ahead.take_all((1, 2, 3)) == 3
    assert [mask[1] for mask in ahead.masks] == [0, 1, 2, 3]
    assert asked == ["allowed"]


@pytest.mark.parametrize(
    ("constraint", "drafts", "count"),
    [
        (Allowing([]), (1, 7, 2), 1),
        (Allowing([]), (1, -1), 1),
        (Allowing([]), (16,), 0),
        (Allowing([], ends_after=2), (1, 2, 3), 2),
        (Allowing([], fails_after=1), (1, 2, 3), 1),
        (Allowing([], accepted=2, fails_after=1), (1,), 0),
    ],
    ids=["a bit not set", "negative", "beyond the mask", "complete", "failing", "failed"],
)
def test_looking_ahead_stops_where_no_draft_may_follow(
    constraint: Constraint, drafts: tuple[int, ...], count: int
) -> None:
    ahead = Lookahead(constraint)
    assert ahead.take_all(drafts) == count
    assert len(ahead.masks) == 1 + count


@dataclass(eq=False)
class Listening(HashedConstraint):
    """Notes what is asked of it; its forks note nothing."""

    asked: list[str] = field(default_factory=list[str])

    def accept(self, token_id: int) -> None:
        self.asked.append(f"accept {token_id}")
        HashedConstraint.accept(self, token_id)

    def allowed(self) -> bytes:
        self.asked.append("allowed")
        return HashedConstraint.allowed(self)

    def fork(self) -> HashedConstraint:
        return HashedConstraint(self.grammar, [*self.accepted])


def asked_of(request: Request, kind: type[Drafting] | None) -> list[str]:
    """What the constraint of a request's only sequence is asked, in order."""
    asked: list[str] = []

    class Listened(Scheduler):
        def add(self, sequence: Sequence) -> None:
            assert isinstance(sequence.constraint, HashedConstraint)
            sequence.constraint = Listening(sequence.constraint.grammar, asked=asked)
            source = Foresight(sequence, random.Random(1), error=0.1)
            sequence.drafting = None if kind is None else kind(source=source, most=5)
            super().add(sequence)

    engine = make_engine(LIMITS, parts=Parts(scheduler=Listened))
    run_requests(engine, [request]).verify()
    num_accepted = engine.draft_counts.num_accepted_tokens
    assert num_accepted > 10 if kind is not None else num_accepted == 0
    return asked


def test_a_constraint_is_asked_the_same_with_drafts_as_without() -> None:
    """A library that bounds the work of a stream so ends it at the same token."""
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=5)
    spec = ConstraintSpec(grammar="asked")
    request = Request(prompt_token_ids=(1, 2, 3), params=params, constraint=spec)
    asked = asked_of(request, None)
    assert asked == asked_of(request, AlwaysDrafts)
    assert asked.count("allowed") > 40


def test_a_constraint_is_asked_the_same_where_another_engine_goes_on() -> None:
    asked: list[str] = []
    request = Request(prompt_token_ids=(1, 2), constraint=ConstraintSpec(grammar="asked"))
    resumed = Sequence(
        request_id=0,
        request=request,
        seed=0,
        max_num_tokens=20,
        stop_token_ids=frozenset(),
        token_ids=[1, 2, 7, 8],
    )
    compiling = Compiling(lambda spec: Compiled(Listening(spec.grammar, asked=asked)))
    compiling.add([resumed])
    ((_, is_constrained),) = next(filter(None, iter(lambda: [*compiling.take()], None)))
    assert is_constrained
    assert asked == ["allowed", "accept 7", "allowed", "accept 8"]


@dataclass(eq=False)
class Counting(HashedConstraint):
    """Notes each mask that is made for a draft."""

    made: list[int] = field(default_factory=list[int])
    is_fork: bool = False

    def allowed(self) -> bytes:
        if self.is_fork:
            self.made.append(len(self.accepted))
        return HashedConstraint.allowed(self)

    def fork(self) -> HashedConstraint:
        return Counting(self.grammar, [*self.accepted], made=self.made, is_fork=True)


def masks_of_steps(num_requests: int, num_pages: int) -> list[tuple[int, int]]:
    """Of each step of constrained sequences, which draft as much as they may: the masks that it
    made for drafts, and its drafts."""
    made: list[int] = []
    found: list[tuple[int, int]] = []

    class Counted(Scheduler):
        def add(self, sequence: Sequence) -> None:
            assert sequence.constraint is not None
            sequence.constraint = Counting("b", made=made)
            source = Foresight(sequence, random.Random(1), error=0.0)
            sequence.drafting = AlwaysDrafts(source=source, most=MAX_SPECULATIVE_TOKENS)
            super().add(sequence)

        def schedule(self, now_s: float = 0.0) -> Batch | None:
            made.clear()
            batch = super().schedule(now_s)
            if batch is not None:
                found.append((len(made), sum(len(entry.drafts) for entry in batch.entries)))
            return batch

    limits = replace(LIMITS, max_num_batched_tokens=100, num_pages=num_pages)
    engine = make_engine(limits, parts=Parts(scheduler=Counted))
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)
    spec = ConstraintSpec(grammar="b")
    requests = [
        Request(prompt_token_ids=(first, 2, 3), params=params, constraint=spec)
        for first in range(num_requests)
    ]
    run_requests(engine, requests).verify()
    return found


def test_the_masks_that_a_step_makes_for_drafts_are_bounded():
    assert max(made for made, _ in masks_of_steps(1, 28)) == MAX_ROW_MASKS
    assert MAX_ROW_MASKS < max(made for made, _ in masks_of_steps(4, 28)) <= MAX_STEP_MASKS


def test_no_mask_is_made_for_a_draft_that_has_no_page():
    steps = masks_of_steps(4, 7)
    assert sum(drafts for _, drafts in steps) > 100
    assert all(made <= drafts for made, drafts in steps)
