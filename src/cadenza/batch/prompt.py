"""`Prompt`: how a sequence's prompt is computed: which tokens, what attends both ways, what is read
of it. Invariants: every position from 1 to its end is reported once and in order, whatever is
preempted or in flight; hidden states are added in that order and in float64. N tokens, E embed."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cadenza.batch.whole_spans import WholeSpan, whole_spans_of
from cadenza.events import WholePromptReason
from cadenza.request import Request
from cadenza.sparse_prefill import KeptTokens


@dataclass(slots=True, eq=False, kw_only=True)
class PromptRowsProgress:
    """Positions below `num_read` were reported, below `num_launched` launched; from 1, as no row
    precedes."""

    num_prompt_tokens: int
    num_launched: int = 1
    num_read: int = 1

    @property
    def is_complete(self) -> bool:
        return self.num_read >= self.num_prompt_tokens

    def positions(self, start: int, end: int) -> range:
        """Not yet launched, whose logits result from computing tokens [start, end)."""
        return range(max(start + 1, self.num_launched), min(end + 1, self.num_prompt_tokens))

    def fit(self, start: int, count: int, num_rows: int) -> int:
        """The most tokens from `start`, up to `count`, that need at most `num_rows` rows."""
        positions = self.positions(start, start + count)
        if len(positions) <= num_rows:
            return count
        return positions.start + num_rows - 1 - start

    def launch(self, start: int, end: int) -> range:
        positions = self.positions(start, end)
        self.num_launched = max(self.num_launched, positions.stop)
        return positions

    def read(self, positions: range) -> range:
        fresh = range(max(positions.start, self.num_read), positions.stop)
        self.num_read = max(self.num_read, fresh.stop)
        return fresh

    def skip(self, count: int) -> None:
        self.num_launched = self.num_read = 1 + count

    def rewind(self) -> None:
        self.num_launched = self.num_read


@dataclass(slots=True, eq=False, kw_only=True)
class Pool:
    """The mean of hidden states, cut to `dimensions` (None: all), of unit length with `normalize`.
    `embedding`: float32, little endian; None before `finish`."""

    dimensions: int | None
    normalize: bool = True
    embedding: bytes | None = field(default=None, init=False)
    _total: npt.NDArray[np.float64] | None = field(default=None, init=False)  # [E]
    _count: int = field(default=0, init=False)

    def add(self, states: npt.NDArray[np.float32]) -> None:
        """Hidden states [N, E] of consecutive tokens."""
        for state in states.astype(np.float64):
            # A sum by numpy would be of an order of its own.
            self._total = state.copy() if self._total is None else self._total + state
            self._count += 1

    def finish(self) -> bool:
        """False if the mean is not finite. Zeros stay."""
        assert self._total is not None, "nothing was added"
        values = self._total[: self.dimensions] / self._count  # [D]
        if not np.isfinite(values).all():
            return False
        if self.normalize:
            # Exactly rounded, whatever the order.
            length = math.sqrt(math.fsum((values * values).tolist()))
            values = values / (length or 1.0)
        self.embedding = values.astype("<f4").tobytes()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is not the same for the prompts of all sequences; `PLAIN` of most."""

    # the tokens that are computed of a pruned one; a position is an index among these. None while
    # they are not known, and where the whole prompt is computed.
    kept: KeptTokens | None = None
    whole_reason: WholePromptReason | None = None  # of one that might have been pruned
    spans: tuple[WholeSpan, ...] = ()  # empty if its tokens attend to earlier ones only
    rows: PromptRowsProgress | None = None  # None: it needs that of its last token only
    pool: Pool | None = None  # of its hidden states

    @classmethod
    def of(cls, request: Request, *, has_rows: bool, has_spans: bool) -> "Prompt":
        """Of a request's sample; its first one has the rows that the request asks for."""
        num_tokens, asked = len(request.prompt_token_ids), request.pooling
        needs_rows = has_rows and request.needs_prompt_rows
        spans = whole_spans_of(request.attachments) if has_spans else ()
        if not (spans or needs_rows or asked):
            return PLAIN
        return cls(
            spans=spans,
            rows=PromptRowsProgress(num_prompt_tokens=num_tokens) if needs_rows else None,
            pool=asked and Pool(dimensions=asked.dimensions, normalize=asked.normalize),
        )


PLAIN = Prompt()
