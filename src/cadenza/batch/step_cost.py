"""`StepCost`: a step's time, predicted from its load and corrected by measured steps; `StepBound`:
a bound on it. Invariant: predictions are positive and grow with each part of the load."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

CORRECTION = 0.1  # The share of a step's error by which the costs change

# A measured time counts as at most this multiple of its prediction, and at least its inverse.
MAX_RATIO = 2.0

SMALLEST_MS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """A token at position p attends to p + 1 keys, its own among them."""

    num_tokens: int = 0
    num_logits: int = 0
    num_keys: int = 0

    def plus(self, start: int, count: int, num_logits: int) -> "StepLoad":
        return StepLoad(
            num_tokens=self.num_tokens + count,
            num_logits=self.num_logits + num_logits,
            num_keys=self.num_keys + num_keys(start, count),
        )


def num_keys(start: int, count: int) -> int:
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Milliseconds: `fixed_ms`, and so much for each token, logit row and key."""

    fixed_ms: float
    token_ms: float
    logit_ms: float
    key_ms: float

    def predict_ms(self, load: StepLoad) -> float:
        return (
            self.fixed_ms
            + self.token_ms * load.num_tokens
            + self.logit_ms * load.num_logits
            + self.key_ms * load.num_keys
        )

    def row_ms(self, num_keys: float) -> float:
        return self.token_ms + self.logit_ms + self.key_ms * num_keys

    def scaled(self, factor: float) -> "StepCost":
        return StepCost(
            fixed_ms=self.fixed_ms * factor,
            token_ms=self.token_ms * factor,
            logit_ms=self.logit_ms * factor,
            key_ms=self.key_ms * factor,
        )

    def corrected(self, load: StepLoad, measured_ms: float) -> "StepCost":
        """Each part changes by its share of the prediction; no cost becomes negative."""
        predicted = self.predict_ms(load)
        ratio = min(MAX_RATIO, max(1 / MAX_RATIO, measured_ms / predicted))
        factor = CORRECTION * (ratio - 1) / predicted

        def corrected(ms: float, count: int) -> float:
            return ms * (1 + factor * ms * count)

        return StepCost(
            fixed_ms=corrected(self.fixed_ms, 1),
            token_ms=corrected(self.token_ms, load.num_tokens),
            logit_ms=corrected(self.logit_ms, load.num_logits),
            key_ms=corrected(self.key_ms, load.num_keys),
        )

    def most_tokens(self, start: int, left_ms: float, *, has_logits: bool = False) -> float:
        """Prompt tokens from `start` that take `left_ms`, a fraction; `has_logits`: each has a
        row."""
        if left_ms <= 0:
            return 0.0
        # key_ms / 2 * n^2 + linear * n = left_ms
        linear = self.token_ms + self.key_ms * (start + 0.5)
        linear += self.logit_ms if has_logits else 0.0
        return 2 * left_ms / (linear + sqrt(linear**2 + 2 * self.key_ms * left_ms))

    def granted_ms(self, num_rows: int, start: int) -> float:
        """A step in which every row decodes, and a prompt gets the fewest tokens from `start`."""
        return self.predict_ms(full_decode(num_rows).plus(start, MIN_PROMPT_TOKENS, 0))

    def kept_context(self, bound_ms: float, num_rows: int) -> int:
        """The tokens of a context up to which such steps take at most `bound_ms`; 0 if none do."""
        left_ms = bound_ms - self.granted_ms(num_rows, 0)
        if left_ms < 0:
            return 0
        # A bound that was derived from a context is kept up to it, whatever the rounding.
        return int(left_ms / (MIN_PROMPT_TOKENS * self.key_ms) + 1e-3) + MIN_PROMPT_TOKENS

    def prefill_share(self, bound_ms: float, num_tokens: int) -> float:
        """A prompt's rate in steps of at most `bound_ms`, relative to steps of `num_tokens`."""
        most = self.most_tokens(0, bound_ms - self.fixed_ms)
        count = min(num_tokens, max(most, MIN_PROMPT_TOKENS))
        bounded = self.fixed_ms / count + self.token_ms
        return (self.fixed_ms / num_tokens + self.token_ms) / bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The load of a step and the milliseconds that it took."""

    load: StepLoad
    ms: float


def fit_step_cost(
    *,
    one_row: MeasuredStep,
    all_rows: MeasuredStep | None,
    chunk: MeasuredStep,
    far_chunk: MeasuredStep | None,
) -> StepCost:
    """From four steps. `one_row`: one token early in a context; `all_rows`: one of each row; None
    with one row. `chunk`: prompt tokens from the start; `far_chunk`: as many late in the context;
    None where keys cost nothing."""
    num_more = max(1, chunk.load.num_tokens - one_row.load.num_tokens)
    token_ms = (chunk.ms - one_row.ms) / num_more
    logit_ms = key_ms = 0.0
    if all_rows is not None:
        num_rows = all_rows.load.num_tokens - one_row.load.num_tokens
        logit_ms = (all_rows.ms - one_row.ms) / num_rows - max(0.0, token_ms)
    if far_chunk is not None:
        num_more_keys = far_chunk.load.num_keys - chunk.load.num_keys
        key_ms = (far_chunk.ms - chunk.ms) / num_more_keys
    parts = [max(SMALLEST_MS, ms) for ms in (token_ms, logit_ms, key_ms)]
    cost = StepCost(fixed_ms=SMALLEST_MS, token_ms=parts[0], logit_ms=parts[1], key_ms=parts[2])
    fixed_ms = one_row.ms - cost.predict_ms(one_row.load)
    return replace(cost, fixed_ms=max(SMALLEST_MS, fixed_ms))


# Prompt tokens of a step whose decodes leave no time for any, so that prompts go on.
MIN_PROMPT_TOKENS = 16


MIN_BOUND_MS = 50.0
DECODE_STEPS_PER_BOUND = 2.0
# Steps of longer contexts do not make the default bound longer, which holds for all prompts.
BOUND_CONTEXT = 8192


def full_decode(num_rows: int) -> StepLoad:
    """A step in which every row decodes, early in its context."""
    return StepLoad(num_tokens=num_rows, num_logits=num_rows, num_keys=num_rows)


def last_granted(max_model_len: int) -> int:
    """Where the last `MIN_PROMPT_TOKENS` begin of the context up to which bounds should be kept."""
    return max(0, min(max_model_len, BOUND_CONTEXT) - MIN_PROMPT_TOKENS)


def derive_bound_ms(cost: StepCost, num_rows: int, max_model_len: int) -> float:
    """At least 50 ms: twice a full decode step or, if longer, one with the fewest prompt tokens at
    the end of the context or of `BOUND_CONTEXT`."""
    decode_ms = cost.predict_ms(full_decode(num_rows))
    granted_ms = cost.granted_ms(num_rows, last_granted(max_model_len))
    return max(MIN_BOUND_MS, DECODE_STEPS_PER_BOUND * decode_ms, granted_ms)


# Steps that take up to this multiple of the bound are as they should be; see `StepBound.tail`.
TOLERANCE = 1.1

TAIL_SHARE, TAIL_STEP = 0.01, 0.05
MAX_TAIL = 2.0


@dataclass(slots=True, eq=False, kw_only=True)
class StepBound:
    """A bound on a step's time, which is the longest between two tokens of a stream that is not
    preempted, as far as the predictions hold."""

    # the bound; also the longest time between two tokens of a stream that is not preempted, as far
    # as the predictions hold
    max_ms: float
    cost: StepCost
    # the bound from the current costs, so that prompts do not stand still when the machine becomes
    # slower; None if the bound is fixed
    derive_ms: Callable[[StepCost], float] | None = None
    # the multiple of its prediction that one step with prompts in a hundred exceeds. Where it is
    # above `TOLERANCE`, as with other load on the machine, steps are shorter.
    tail: float = TOLERANCE
    # steps with `MIN_PROMPT_TOKENS` although they are predicted to exceed the bound
    num_granted: int = 0
    num_exceeded: int = 0  # steps that took longer than the bound

    def left_ms(self, decodes: StepLoad) -> float:
        return self.max_ms * min(1.0, TOLERANCE / self.tail) - self.cost.predict_ms(decodes)

    def count(self, measured_ms: float) -> None:
        """Nothing is learned from the step."""
        self.num_exceeded += measured_ms > self.max_ms

    def observe(self, load: StepLoad, measured_ms: float) -> None:
        self.count(measured_ms)
        if load.num_tokens > load.num_logits:
            is_late = measured_ms > self.tail * self.cost.predict_ms(load)
            self.tail += TAIL_STEP * (is_late - TAIL_SHARE)
            self.tail = min(MAX_TAIL, max(1.0, self.tail))
        self.cost = self.cost.corrected(load, measured_ms)
        if self.derive_ms is not None:
            self.max_ms = self.derive_ms(self.cost)
