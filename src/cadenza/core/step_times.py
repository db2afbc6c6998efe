"""`StepTimes`: what a scheduler's steps are to take, and what is learned from what they took.

Owns the cost of steps where their time is not bounded; the bound owns it otherwise. Invariant: a
step says something only about what it consists of: one with quanta, or with prompts to be
scored, what these cost, one with drafts what drafts do, and the others what tokens do.
"""

from cadenza.core.batch import Batch
from cadenza.core.image_queue import ImageQueue
from cadenza.core.scoring_queue import ScoringQueue
from cadenza.core.span_queue import SpanQueue
from cadenza.core.step_cost import StepBound, StepCost
from cadenza.core.step_drafts import StepDrafts


class StepTimes:
    """Of steps within `bound`, or, without one, of the known `cost`, if there is one; `parts` are
    what has costs of its own in them."""

    def __init__(
        self,
        bound: StepBound | None,
        cost: StepCost | None,
        parts: tuple[ImageQueue, SpanQueue, ScoringQueue, StepDrafts],
    ) -> None:
        self._bound = bound
        self._own_cost = cost
        self._images, self._spans, self._scoring, self._drafts = parts

    @property
    def cost(self) -> StepCost | None:
        """Of a step's tokens; None if it is not known."""
        return self._own_cost if self._bound is None else self._bound.cost

    def predict_ms(self, batch: Batch) -> float | None:
        """What a step is to take; None if that is not known."""
        cost = self.cost
        return None if cost is None else cost.predict_ms(batch.load) + sum(self._parts_ms(batch))

    def observe(self, batch: Batch, measured_ms: float, idle_ms: float | None) -> None:
        """A step took `measured_ms`, after `idle_ms` if it waited for the newest tokens."""
        cost, is_mixed = self.cost, batch.has_quanta or batch.scored is not None
        if is_mixed:
            self._observe_parts(batch, measured_ms)
        if cost is None:
            return
        self._drafts.observe(batch, measured_ms, cost, idle_ms)
        is_plain = not (batch.has_drafts or is_mixed)
        if self._bound is None:
            if is_plain:
                self._own_cost = cost.corrected(batch.load, measured_ms)
        elif is_plain:
            self._bound.observe(batch.load, measured_ms)
        else:
            self._bound.count(measured_ms)

    def _observe_parts(self, batch: Batch, measured_ms: float) -> None:
        """Each part of a step beside its tokens corrects its cost by what the others were to
        take."""
        cost = self.cost
        text_ms: float | None = 0.0
        if batch.entries:
            text_ms = None if cost is None else cost.predict_ms(batch.load)
        image_ms, span_ms, scoring_ms = self._parts_ms(batch)
        if batch.image_calls:
            others_ms = None if text_ms is None else text_ms + span_ms + scoring_ms
            self._images.observe(batch, others_ms, measured_ms)
        if text_ms is None:
            return
        if batch.span is not None:
            self._spans.observe(batch, text_ms + image_ms + scoring_ms, measured_ms)
        if batch.scored is not None:
            others_ms = text_ms + image_ms + span_ms
            self._scoring.observe(batch.scored, others_ms, measured_ms)

    def _parts_ms(self, batch: Batch) -> tuple[float, float, float]:
        """What a step's images, its span and its scoring are to take."""
        return (
            self._images.predict_ms(batch),
            self._spans.predict_ms(batch),
            self._scoring.predict_ms(batch.scored),
        )
