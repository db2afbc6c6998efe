"""Where a step's time goes: each operation's part, and the rest that XLA and the host keep.

Pure arithmetic over counters. Knows no engine. Every step is the same program, so a run from idle
to idle (`calls_of_a_step`) tells how often a step calls each operation: as often as for each call
of `next_token`, of which a step has one. An operation's part of another run's step is its mean time
for a call times those calls; a window that opens in the middle of a step then counts it right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadenza.backends.base import OpTotals
from cadenza.bench.runs import Timed

STEP_OP = "next_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShare:
    """One operation of one step."""

    op: str
    calls: int
    ms: float
    read_bytes: int

    @property
    def read_gb_s(self) -> float:
        return self.read_bytes / self.ms / 1e6 if self.ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step; `ops` in the order of their time. Empty where no step was counted."""

    step_ms: float
    ops: tuple[OpShare, ...]

    @property
    def kernels_ms(self) -> float:
        return sum(share.ms for share in self.ops)

    @property
    def rest_ms(self) -> float:
        """What is left in XLA, in the runner and on the host where it is not overlapped."""
        return self.step_ms - self.kernels_ms

    @property
    def read_bytes(self) -> int:
        return sum(share.read_bytes for share in self.ops)


def calls_of_a_step(ops: Sequence[OpTotals]) -> dict[str, int]:
    """How often a step calls each operation, from the totals of whole steps."""
    num_steps = next((op.num_calls for op in ops if op.name == STEP_OP), 0)
    return {op.name: op.num_calls // num_steps for op in ops if op.num_calls and num_steps}


def step_profile(timed: Timed, calls: Mapping[str, int]) -> StepProfile:
    """The average step of a run with counters; `calls` from `calls_of_a_step`."""
    shares = [_share(op, calls.get(op.name, 0)) for op in timed.ops if op.num_calls]
    return StepProfile(
        step_ms=1e3 * timed.elapsed_s / max(1, timed.num_steps),
        ops=tuple(sorted(shares, key=lambda share: -share.ms)),
    )


def _share(op: OpTotals, calls: int) -> OpShare:
    return OpShare(
        op=op.name,
        calls=calls,
        ms=1e3 * op.elapsed_s / op.num_calls * calls,
        read_bytes=round(op.read_bytes / op.num_calls * calls),
    )
