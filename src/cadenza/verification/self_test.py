"""`verify --self-test`: checks that the gate catches rows that depend on their neighbours.

Runs the gate with a correct runner, which must pass, and with each faulty one, which must fail.
Faults that need longer prompts than the workload has are skipped by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.verification.gate import GateResult

RunWith = Callable[[str | None], GateResult]
"""Runs the gate with the named fault; None for no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """Which faults the gate caught; `sound_passed` is the control without a fault.

    `ops` is the op table with the faults; `note` says why, if it is not the one used for serving.
    `skipped` faults need longer prompts than the context allows.
    """

    ops: str
    sound_passed: bool
    caught: tuple[str, ...]
    missed: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    note: str | None = None

    @property
    def passed(self) -> bool:
        return self.sound_passed and bool(self.caught) and not self.missed

    @property
    def last_line(self) -> str:
        if self.passed:
            skipped = f" skipped={len(self.skipped)}" if self.skipped else ""
            return f"SELF-TEST PASS caught={len(self.caught)}{skipped} ops={self.ops}"
        if not self.sound_passed:
            return "SELF-TEST FAIL the gate fails without any fault"
        return f"SELF-TEST FAIL missed={', '.join(self.missed)}"


def run_self_test(run_with: RunWith, faults: list[str], *, ops: str) -> SelfTestResult:
    """Runs the gate on the op table `ops`: once without a fault and once with each."""
    sound = run_with(None)
    results = {fault: run_with(fault) for fault in faults}
    return SelfTestResult(
        ops=ops,
        sound_passed=sound.passed,
        caught=tuple(fault for fault, result in results.items() if result.mismatch is not None),
        missed=tuple(fault for fault, result in results.items() if result.mismatch is None),
    )
