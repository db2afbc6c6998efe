"""What a constraint is asked for drafts: on forks, within bounds, and the same as without them."""

import random
from dataclasses import dataclass, field, replace

import pytest

from cadenza.batch.batch import Batch
from cadenza.batch.sequence import Sequence
from cadenza.drafting.drafts import Drafting, Lookahead
from cadenza.engine.new_sequences import Compiling
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.step_budget import MAX_ROW_MASKS, MAX_STEP_MASKS
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS
from cadenza.structured import Constraint, ConstraintSpec
from tests.engine.drafting import LIMITS, AlwaysDrafts, Foresight
from tests.engine.hashed_constraint import Compiled, HashedConstraint
from tests.engine.simulation import Parts, make_engine, run_requests


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
class Listening:
    """A constraint that notes what is asked of it; its forks note nothing."""

    inner: HashedConstraint
    asked: list[str]

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete

    @property
    def has_failed(self) -> bool:
        return self.inner.has_failed

    def accept(self, token_id: int) -> None:
        self.asked.append(f"accept {token_id}")
        self.inner.accept(token_id)

    def allowed(self) -> bytes:
        self.asked.append("allowed")
        return self.inner.allowed()

    def forced(self) -> list[int]:
        return []

    def fork(self) -> HashedConstraint:
        return self.inner.fork()


def asked_of(request: Request, kind: type[Drafting] | None) -> list[str]:
    """What the constraint of a request's only sequence is asked, in order."""
    asked: list[str] = []

    class Listened(Scheduler):
        def add(self, sequence: Sequence) -> None:
            assert isinstance(sequence.constraint, HashedConstraint)
            sequence.constraint = Listening(sequence.constraint, asked)
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
    compiling = Compiling(lambda spec: Compiled(Listening(HashedConstraint(spec.grammar), asked)))
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
