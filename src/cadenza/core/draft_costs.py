"""`DraftCosts`: what a step costs without drafts, and what each draft adds, by number of rows.

`StepCost` is one line through steps of few tokens and of many. A few tokens more are nearly free
while a step waits for the weights, and dear where it computes: so both costs are measured here for
each number of decoding rows. Knows no sequences and no clock.
"""

from dataclasses import dataclass

from cadenza.core.step_cost import MAX_RATIO, SMALLEST_MS, StepCost, StepLoad

WEIGHT_OF_NEWEST, WEIGHT_OF_OLD = 0.3, 0.01
FIRST_PRICE = 1.25
"""Of a draft, as a multiple of what `StepCost` says, before any was measured."""

MAX_CHANGE, MAX_DRAFT_CHANGE = 1.25, 1.5
"""How far one measured time may be from what a step, or a draft, is known to take; what is further
counts as so far: now and then a step takes twice as long, for reasons of the host."""

MIN_PRICE, MAX_PRICE = 0.2, 4.0
FIRST_STEPS, REFRESH_STEPS = 4, 64
"""Steps with drafts after which one without is wanted, to measure what it costs: for the first
time, and later."""


@dataclass(slots=True, eq=False)
class _Measured:
    """Of one number of rows: milliseconds of a step without drafts, when its rows attended to
    `num_keys`, and of each draft; None before any was measured."""

    base_ms: float | None = None
    num_keys: float = 0.0
    draft_ms: float | None = None
    num_since_base: int = 0


class DraftCosts:
    """Starts from what `StepCost` says."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def observe(self, load: StepLoad, ms: float, cost: StepCost) -> None:
        """A step without drafts took `ms`; one with prompts says nothing.

        What drafts cost is slowly forgotten meanwhile, so that one measured time that was far too
        long does not end them.
        """
        if load.num_tokens != load.num_logits:
            return
        measured = self._measured.setdefault(load.num_logits, _Measured())
        predicted_ms = cost.predict_ms(load)
        ms = min(MAX_RATIO * predicted_ms, max(predicted_ms / MAX_RATIO, ms))
        if measured.base_ms is None:
            measured.base_ms, measured.num_keys, measured.draft_ms = ms, load.num_keys, None
        else:
            known_ms = self._base_ms(load, cost)
            ms = min(MAX_CHANGE * known_ms, max(known_ms / MAX_CHANGE, ms))
        measured.base_ms += WEIGHT_OF_NEWEST * (ms - measured.base_ms)
        measured.num_keys += WEIGHT_OF_NEWEST * (load.num_keys - measured.num_keys)
        measured.num_since_base = 0
        if measured.draft_ms is not None:
            first_ms = FIRST_PRICE * _own_ms(load, cost)
            measured.draft_ms += WEIGHT_OF_OLD * (first_ms - measured.draft_ms)

    def observe_drafts(self, load: StepLoad, num_drafts: int, ms: float, cost: StepCost) -> None:
        """A step of `load` and some drafts took `ms`; one with prompts says nothing."""
        if load.num_tokens != load.num_logits:
            return
        measured = self._measured.setdefault(load.num_logits, _Measured())
        measured.num_since_base += 1
        own_ms = _own_ms(load, cost)
        draft_ms = (ms - self._base_ms(load, cost)) / num_drafts
        old_ms = FIRST_PRICE * own_ms if measured.draft_ms is None else measured.draft_ms
        draft_ms = min(MAX_DRAFT_CHANGE * old_ms, max(old_ms / MAX_DRAFT_CHANGE, draft_ms))
        draft_ms = min(MAX_PRICE * own_ms, max(MIN_PRICE * own_ms, draft_ms))
        measured.draft_ms = old_ms + WEIGHT_OF_NEWEST * (draft_ms - old_ms)

    def is_stale(self, load: StepLoad) -> bool:
        """Whether a step of `load` should go without drafts, to be measured."""
        measured = self._measured.get(load.num_logits)
        if measured is None or load.num_tokens != load.num_logits:
            return False
        return measured.num_since_base >= (
            FIRST_STEPS if measured.base_ms is None else REFRESH_STEPS
        )

    def beside(self, load: StepLoad, cost: StepCost) -> StepCost:
        """The cost of a step of `load` with a few drafts: exact for `load`, and each token more
        costs as much as a draft."""
        measured = self._measured.get(load.num_logits)
        if measured is None or measured.draft_ms is None:
            draft_ms = FIRST_PRICE * _own_ms(load, cost)
        else:
            draft_ms = measured.draft_ms
        fixed_ms = self._base_ms(load, cost) - draft_ms * load.num_tokens
        return StepCost(fixed_ms=fixed_ms, token_ms=draft_ms, logit_ms=0.0, key_ms=0.0)

    def _base_ms(self, load: StepLoad, cost: StepCost) -> float:
        """Of `load`, which may hold prompts beside the rows."""
        measured, predicted_ms = self._measured.get(load.num_logits), cost.predict_ms(load)
        if measured is None or measured.base_ms is None:
            return predicted_ms
        rows = StepLoad(num_tokens=load.num_logits, num_logits=load.num_logits)
        more_ms = predicted_ms - cost.predict_ms(rows) - cost.key_ms * measured.num_keys
        return max(measured.base_ms / 2, measured.base_ms + more_ms, SMALLEST_MS)


def _own_ms(load: StepLoad, cost: StepCost) -> float:
    """Of one more token with a logit row, beside rows like those of `load`."""
    num_keys = max(0, load.num_keys) / load.num_logits if load.num_logits else 0.0
    return cost.token_ms + cost.logit_ms + cost.key_ms * num_keys
