"""`SpanQueue`: the span that is computed in quanta, how much of it a step computes, and its cost.

A prompt that stands at a span which attends both ways shares a step as all prompts do. What its
share buys is the whole span, if that fits, or else quanta (`whole_spans`). The device keeps the
residual stream of one span: its sequence is the holder until the last quantum is launched, and
others wait at their spans, unless these fit a step. Only where the time of steps is bounded are
there quanta.

Invariant: until its last quantum is launched, the holder stands where the span's rows begin, and
nothing that it has computed of them is counted. Whatever takes its row, its pages or the device's
state away drops it, and the span is computed anew.
"""

from dataclasses import dataclass

from cadenza.core.batch import Batch, SpanStep
from cadenza.core.image_cost import SMALLEST_MS, ImageCost
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.core.step_cost import StepBound, StepCost
from cadenza.core.whole_spans import SpanRest, SpanShape, WholeSpan, cut_within


@dataclass(slots=True, eq=False)
class _Held:
    """The span that is computed for a sequence: its uncomputed rows, of which quanta are launched,
    or in the step that is being planned."""

    sequence: Sequence
    rows: WholeSpan
    rest: SpanRest
    num_planned: int = 0

    @property
    def has_begun(self) -> bool:
        return self.rest.has_begun


class SpanQueue:
    """The spans of one scheduler's sequences; `shape` is the runner's, None if it has no passes."""

    def __init__(self, shape: SpanShape | None, bound: StepBound | None) -> None:
        self._shape = shape if bound is not None else None
        self.cost = ImageCost() if bound is None else _first_cost(bound.cost, shape)
        self.num_computed = 0
        """Spans that steps have computed in quanta; never decreases."""
        self._held: _Held | None = None
        self._retried: Sequence | None = None

    @property
    def holder(self) -> Sequence | None:
        """The sequence of the span of which some quanta are launched, but not all."""
        held = self._held
        return held.sequence if held is not None and held.has_begun else None

    @property
    def is_planned(self) -> bool:
        """Whether the step that is being planned computes quanta."""
        return self._held is not None and self._held.num_planned > 0

    def start_step(self, retried: Sequence | None) -> None:
        """A step is planned, which may be that of `retried` alone."""
        self._retried = retried
        if self._held is not None and not self._held.has_begun:
            self._held = None

    def serves(self, sequence: Sequence) -> bool:
        """Whether its spans are computed in quanta where they do not fit. Logit rows within spans,
        and states of recurrences, are those of steps."""
        return (
            self._shape is not None
            and bool(sequence.whole_spans)
            and not sequence.needs_prompt_rows
            and sequence.state is None
        )

    def rest_of(self, sequence: Sequence, start: int) -> SpanRest | None:
        """What is left of the span in which a sequence stands at `start`, if its quanta may be
        computed now: nobody else's are, and nobody asked before in this step. Whose step it is
        alone displaces the holder, which could not go on in it."""
        if not self.serves(sequence):
            return None
        span = cut_within(sequence.whole_spans, start + 1)
        if span is None:
            return None
        held, rows = self._held, WholeSpan(start, span.stop)
        if held is None or (held.sequence is not sequence and sequence is self._retried):
            assert self._shape is not None
            if rows.stop - rows.start > self._shape.max_rows:
                return None
            rest = SpanRest(work=self._shape.work(*rows), cost=self.cost)
            held = self._held = _Held(sequence, rows, rest)
        if held.sequence is not sequence or held.rows != rows:
            return None
        return held.rest

    def plan(self, sequence: Sequence, count: int) -> None:
        """The step computes the next `count` quanta of the span that `rest_of` gave."""
        held = self._held
        assert held is not None, "no span is held"
        assert held.sequence is sequence, "another one's span is held"
        held.num_planned = count

    def num_rows_of(self, sequence: Sequence) -> int:
        """The rows of its span that are not computed."""
        assert self._held is not None, "no span is held"
        assert self._held.sequence is sequence, "another one's span is held"
        return self._held.rows.stop - self._held.rows.start

    def launch(self, batch: Batch) -> SpanStep | None:
        """Adds the planned quanta to a step, if there are any. With the last of them the sequence
        has computed its span; of a prompt's last token only keys and values are."""
        held, shape = self._held, self._shape
        if held is None or not held.num_planned or shape is None:
            return None
        sequence, (start, stop) = held.sequence, held.rows
        assert sequence.row is not None, "the sequence of a span has no row"
        assert sequence.num_computed_tokens == start, "the sequence does not stand at its span"
        first, count = held.rest.num_done, held.num_planned
        held.rest, held.num_planned = held.rest.behind(count), 0
        step = batch.span = SpanStep(
            sequence=sequence,
            row=sequence.row,
            start=start,
            stop=stop,
            rows=tuple(shape.rows(stop - start, first, first + count)),
            is_first=first == 0,
            max_rows=shape.max_rows,
        )
        batch.span_load = held.rest.work.load(first, first + count)
        batch.quanta_for.append(sequence)
        if held.rest.num_done == len(held.rest.work):
            sequence.num_computed_tokens = min(stop, sequence.num_tokens - 1)
            self.num_computed += 1
            self._held = None
        return step

    def remove(self, sequence: Sequence) -> None:
        """A sequence loses its row, as all do with the device's state: what was computed of its
        span is dropped."""
        if self._held is not None and self._held.sequence is sequence:
            self._held = None

    def predict_ms(self, batch: Batch) -> float:
        """What a step's quanta of a span are to take."""
        return 0.0 if batch.span is None else self.cost.predict_ms(batch.span_load)

    def observe(self, batch: Batch, other_ms: float, measured_ms: float) -> None:
        """A step with quanta took `measured_ms`; all else in it was to take `other_ms`."""
        self.cost = self.cost.corrected(batch.span_load, other_ms, measured_ms)
        if self._held is not None:
            self._held.rest = self._held.rest.at_cost(self.cost)

    def check_invariants(self) -> None:
        """Raises AssertionError if the holder does not stand at its span."""
        held = self._held
        if held is None or not held.has_begun:
            return
        assert held.sequence.status is SequenceStatus.RUNNING, "a span's sequence does not run"
        assert held.sequence.num_computed_tokens == held.rows.start, "its span was cut"
        assert held.rest.num_done < len(held.rest.work), "a span that is computed is held"
        assert not held.num_planned, "planned quanta were not launched"


def _first_cost(cost: StepCost, shape: SpanShape | None) -> ImageCost:
    """What the costs of steps imply: a quantum reads a layer's weights."""
    if shape is None:
        return ImageCost()
    return ImageCost(
        quantum_ms=max(SMALLEST_MS, cost.fixed_ms / shape.num_passes),
        product_ms=cost.token_ms,
        attention_ms=cost.key_ms,
    )
