"""`StepWork`: what a step does besides the tokens of running sequences: images, spans, drafts,
scores. The scheduler calls the hooks of a list of works in order. Invariant: a hook left out
changes nothing; what a work adds to a step is in `predict_ms` from then on."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence, WaitReason
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.figures import Figure
from cadenza.kv.prefix_cache import Prefix
from cadenza.request import Request
from cadenza.scheduler.admission import Reservations
from cadenza.scheduler.step_budget import SHORT_SHARE, PromptPart
from cadenza.scheduler.turns import StepTurns
from cadenza.tenant import Tenant


class PromptQuanta(NamedTuple):
    """Work items of a sequence, which a step computes in place of its tokens."""

    sequence: Sequence
    num_quanta: int


@dataclass(slots=True, eq=False, kw_only=True)
class StepPlan:
    """`kept_share`: of the time that decodes leave, what prompts leave to works. `passed`: the
    retried sequence, if the step is not its own. `has_tokens`: else the step is a work's alone."""

    turns: StepTurns
    running: Collection[Sequence]
    reservations: Reservations
    bound: StepBound | None
    works: SequenceOf["StepWork"]
    kept_share: float = 0.0
    passed: Sequence | None = None
    has_tokens: bool = True
    quanta: PromptQuanta | None = None

    @property
    def alone(self) -> Sequence | None:
        """The sequence of which alone the step may compute something."""
        return None if self.passed is not None else self.turns.retried

    def keep_share(self) -> None:
        self.kept_share = SHORT_SHARE

    def left_ms(self, batch: Batch) -> float | None:
        """What is left of the time after all that is in the step; None without a bound."""
        if self.bound is None:
            return None
        return self.bound.left_ms(batch.load) - sum([w.predict_ms(batch) for w in self.works])


class StepDuration(NamedTuple):
    """`idle_ms`: for which the device waited before. `cost`: of its tokens, as known then.
    `others_ms`: predicted for all but the work asked."""

    measured_ms: float
    idle_ms: float | None
    cost: StepCost | None
    others_ms: float | None


class StepWork(Protocol):
    """Hooks of one work, in the order in which a sequence and a step meet them."""

    @property
    def figures(self) -> tuple[Any, tuple[Figure[Any], ...]] | None:
        """What its figures are read from, and these."""
        return None

    @property
    def holders(self) -> SequenceOf[Sequence]:
        """Sequences of its own that hold pages."""
        return ()

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError for what can never be served."""

    def add(self, sequence: Sequence) -> None:
        """A sequence has come."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""

    def leave_row(self, sequence: Sequence) -> None:
        """It loses its row and pages."""

    def restart(self) -> None:
        """The device lost what it held."""

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        """Raises AssertionError."""

    def must_follow(
        self, running: SequenceOf[Sequence], number: int, cost: StepCost | None
    ) -> bool:
        """Whether step `number` is planned only after the newest tokens; asked once, until a work
        says so."""
        return False

    def begin(self, plan: StepPlan) -> None:
        """A step is planned."""

    def ready(self, running: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Those of running sequences whose next token can be computed."""
        return running

    def wait_reason(self, sequence: Sequence) -> WaitReason | None:
        """Why a waiting sequence does not start, if that is known without a look-up."""
        return None

    def wait_reason_behind(self, sequence: Sequence, prefix: Prefix) -> WaitReason | None:
        """Why a waiting sequence does not start after a prefix."""
        return None

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """A sequence starts after a prefix."""

    def limit(self, part: PromptPart, sequence: Sequence) -> PromptPart:
        """What can be computed now of a prompt."""
        return part

    def give_up_pages(self, tenant: Tenant | None) -> bool:
        """Frees pages of `holders`, of a tenant's if one is given; False if there are none."""
        return False

    def has_work(self, plan: StepPlan) -> bool:
        """Whether a step without tokens computes something."""
        return False

    def extend(
        self, entries: SequenceOf[BatchEntry], num_rows: int, number: int, cost: StepCost | None
    ) -> None:
        """Adds drafts to the entries of the step of this number, with up to `num_rows` logits."""

    def launch(self, plan: StepPlan, batch: Batch) -> int:
        """Adds the plan's work items, if its own; returns how many tokens the last of them
        completes."""
        return 0

    def fill(self, plan: StepPlan, batch: Batch) -> None:
        """Adds what there is time for alongside the step's tokens and work items."""

    def predict_ms(self, batch: Batch) -> float:
        """What it adds to the time of a step's tokens."""
        return 0.0

    def observe(self, batch: Batch, duration: StepDuration) -> None:
        """A step took so long."""

    def unpin(self, batch: Batch) -> None:
        """A launched step was read, or dropped."""

    def settle(self, batch: Batch) -> None:
        """The step, observed last, was applied."""


class StepTimes:
    """Within `bound` or at the known `cost`. A step corrects only the costs of what it consists
    of."""

    def __init__(
        self, bound: StepBound | None, cost: StepCost | None, works: SequenceOf[StepWork]
    ) -> None:
        self._bound = bound
        self._own_cost = cost
        self._works = works

    @property
    def cost(self) -> StepCost | None:
        return self._own_cost if self._bound is None else self._bound.cost

    def predict_ms(self, batch: Batch) -> float | None:
        cost = self.cost
        return None if cost is None else cost.predict_ms(batch.load) + self._others_ms(batch)

    def observe(self, batch: Batch, measured_ms: float, idle_ms: float | None) -> None:
        cost = self.cost
        text_ms: float | None = 0.0
        if batch.entries:
            text_ms = None if cost is None else cost.predict_ms(batch.load)
        others = [
            None if text_ms is None else text_ms + self._others_ms(batch, work)
            for work in self._works
        ]
        for work, others_ms in zip(self._works, others, strict=True):
            work.observe(batch, StepDuration(measured_ms, idle_ms, cost, others_ms))
        if cost is None:
            return
        is_plain = not (batch.has_drafts or batch.has_side_work)
        if self._bound is None:
            if is_plain:
                self._own_cost = cost.corrected(batch.load, measured_ms)
        elif is_plain:
            self._bound.observe(batch.load, measured_ms)
        else:
            self._bound.count(measured_ms)

    def _others_ms(self, batch: Batch, but: StepWork | None = None) -> float:
        return sum([work.predict_ms(batch) for work in self._works if work is not but])
