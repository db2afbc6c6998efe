"""`verify --self-test`: does the gate catch errors that depend on the neighbours?

Builds the runner again with each faulty op table and plays the gate: it must pass with the sound
table and fail with every other one. A fault that needs longer prompts than were played is skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.verification.gate import GateResult

RunWith = Callable[[str | None], GateResult]
"""Plays the gate with the named fault, or with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """Which faults the gate caught; `sound_passed` is the control without any.

    `ops` is the table that they were injected into; `note` says why it is not the one that serves.
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
            return "SELF-TEST FAIL the gate is red without any fault"
        return f"SELF-TEST FAIL missed={', '.join(self.missed)}"


def run_self_test(run_with: RunWith, faults: list[str], *, ops: str) -> SelfTestResult:
    """Plays the gate on the table `ops`: once soundly and once for each fault."""
    sound = run_with(None)
    results = {fault: run_with(fault) for fault in faults}
    return SelfTestResult(
        ops=ops,
        sound_passed=sound.passed,
        caught=tuple(fault for fault, result in results.items() if result.mismatch is not None),
        missed=tuple(fault for fault, result in results.items() if result.mismatch is None),
    )
