"""`SpanQueue`: the span that is computed in work items (`whole_spans`); the device keeps one span's
residual stream. Invariant: until its last item is launched, its holder stays at the span's start
and none of its rows count; losing the row, pages or device state drops the span."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from cadenza.batch.batch import Batch, SpanStep
from cadenza.batch.image_cost import SMALLEST_MS, ImageCost
from cadenza.batch.sequence import Sequence, SequenceStatus
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.whole_spans import SpanRest, SpanShape, WholeSpan, cut_within
from cadenza.scheduler.step_budget import PromptPart
from cadenza.scheduler.step_work import StepDuration, StepPlan, StepWork


@dataclass(slots=True, eq=False)
class _Held:
    """`rows` are not computed; work items of them are launched or planned."""

    sequence: Sequence
    rows: WholeSpan
    rest: SpanRest

    @property
    def has_begun(self) -> bool:
        return self.rest.has_begun


class SpanQueue(StepWork):
    """`shape` is the runner's."""

    def __init__(self, shape: SpanShape, bound: StepBound, page_size: int) -> None:
        self._shape = shape
        self._page_size = page_size
        self.cost = _first_cost(bound.cost, shape)
        self.num_computed = 0  # Spans that steps have computed in work items; never decreases
        self._held: _Held | None = None
        self._plan: StepPlan | None = None

    @property
    def holder(self) -> Sequence | None:
        held = self._held
        return held.sequence if held is not None and held.has_begun else None

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        if self._held is not None and not self._held.has_begun:
            self._held = None

    def serves(self, sequence: Sequence) -> bool:
        """Logit rows within spans and recurrent states need a whole step."""
        return (
            bool(sequence.prompt.spans)
            and not sequence.needs_prompt_rows
            and sequence.state is None
        )

    def limit(self, part: PromptPart, sequence: Sequence) -> PromptPart:
        if not self.serves(sequence):
            return part
        rest = self.rest_of(sequence, part.start) if part.num_left else None
        return replace(part, has_quanta=True, rest=rest)

    def rest_of(self, sequence: Sequence, start: int) -> SpanRest | None:
        """None if another is held or was asked for in this step. A step of one retried sequence
        displaces the holder."""
        span = cut_within(sequence.prompt.spans, start + 1)
        if span is None:
            return None
        held, rows = self._held, WholeSpan(start, span.stop)
        if held is None or (held.sequence is not sequence and self._is_alone(sequence)):
            if rows.stop - rows.start > self._shape.max_rows:
                return None
            num_rows = rows.stop - rows.start
            rest = SpanRest(work=self._shape.work(*rows), cost=self.cost, num_rows=num_rows)
            held = self._held = _Held(sequence, rows, rest)
        if held.sequence is not sequence or held.rows != rows:
            return None
        return held.rest

    def launch(self, plan: StepPlan, batch: Batch) -> int:
        """The last work item completes the span; of a prompt's last token only keys and values."""
        held = self._held
        if plan.quanta is None:
            return 0
        sequence, count = plan.quanta
        assert held is not None, "no span is held"
        assert held.sequence is sequence, "another one's span is held"
        start, stop = held.rows
        assert sequence.row is not None, "the sequence of a span has no row"
        assert sequence.num_computed_tokens == start, "the sequence does not stand at its span"
        first = held.rest.num_done
        held.rest = held.rest.behind(count)
        batch.span = SpanStep(
            sequence=sequence,
            row=sequence.row,
            start=start,
            stop=stop,
            rows=tuple(self._shape.rows(stop - start, first, first + count)),
            is_first=first == 0,
            max_rows=self._shape.max_rows,
        )
        batch.span_load = held.rest.work.load(first, first + count)
        batch.quanta_for.append(sequence)
        batch.write_pages(sequence, start, stop, self._page_size)
        if held.rest.num_done == len(held.rest.work):
            sequence.num_computed_tokens = min(stop, sequence.num_tokens - 1)
            self.num_computed += 1
            self._held = None
        return sequence.num_computed_tokens - start

    def leave_row(self, sequence: Sequence) -> None:
        if self._held is not None and self._held.sequence is sequence:
            self._held = None

    def predict_ms(self, batch: Batch) -> float:
        return 0.0 if batch.span is None else self.cost.predict_ms(batch.span_load)

    def observe(self, batch: Batch, duration: StepDuration) -> None:
        if batch.span is None or duration.others_ms is None:
            return
        self.cost = self.cost.corrected(batch.span_load, duration.others_ms, duration.measured_ms)
        if self._held is not None:
            self._held.rest = self._held.rest.at_cost(self.cost)

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        held = self._held
        if held is None or not held.has_begun:
            return
        assert held.sequence in sequences, "a span is kept of a sequence that has ended"
        assert held.sequence.status is SequenceStatus.RUNNING, "a span's sequence does not run"
        assert held.sequence.num_computed_tokens == held.rows.start, "its span was cut"
        assert held.rest.num_done < len(held.rest.work), "a span that is computed is held"

    def _is_alone(self, sequence: Sequence) -> bool:
        return self._plan is not None and sequence is self._plan.alone


def _first_cost(cost: StepCost, shape: SpanShape) -> ImageCost:
    """What the costs of steps imply: a work item reads a layer's weights."""
    return ImageCost(
        quantum_ms=max(SMALLEST_MS, cost.fixed_ms / shape.num_passes),
        product_ms=cost.token_ms,
        attention_ms=cost.key_ms,
    )
