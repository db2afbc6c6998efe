"""An engine process over the token-storing runner that breaks on command; run as a script.

Owns the commands: tokens of a prompt, each obeyed at the launch that reads it. `Start.model` is a
JSON object: `step_s` how long the device takes, `steps` how many it makes before it stands still
until there is a file `go`, `stuck` a file that it makes before it stands still or hangs, `load_s`
how long the load does nothing, `gate` a file until which the load reads a little now and then,
`fail` the error that ends it, `crash` a load that kills the process, `crash_once` a file that has
one load do so, `room` a file without which the load gets no file descriptor, `identity` a file that
says what streams depend on, `seed` the engine's, `arithmetic` a number that each token is raised by
and `told_arithmetic` what the fingerprint calls it.
"""

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cadenza import errors
from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.process.messages import Start
from cadenza.engine.process.worker import OnPhase, Serving, run_child
from cadenza.fingerprint import Fingerprint

VOCAB_SIZE = 97
NUM_GENERATED = 80
"""Only tokens below are generated, so that no answer is a command."""

KILL, HANG, RAISE, PRINT, SPIN, HOLD_LOCK = 90, 91, 92, 93, 94, 95
KILL_LATE, LATE = 96, 24
"""A prompt that begins with the first is obeyed at the launch that reads this position."""
POLL_S = 0.02


class ScriptedRunner(FakeRunner):
    """Obeys its script, and the commands among a step's tokens."""

    script: Mapping[str, Any] = MappingProxyType({})
    num_launches: int = 0

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        time.sleep(self.script.get("step_s", 0.0))
        tokens = set(inputs.tokens.ids[: inputs.rows.query_starts[-1]].tolist())
        is_last = self.num_launches == self.script.get("steps")
        if "stuck" in self.script and (is_last or tokens & {HANG, SPIN, HOLD_LOCK}):
            Path(self.script["stuck"]).touch()
        if is_last:
            stand_still(self.script.get("go"))
        self.num_launches += 1
        if KILL in tokens or self._has_late_kill(inputs):
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)
        if RAISE in tokens:
            raise RuntimeError("the device was lost")
        if PRINT in tokens:
            print("the device speaks", flush=True)
        if SPIN in tokens:
            time.sleep(3600)
        if HOLD_LOCK in tokens:
            ctypes.PyDLL(None).sleep(3600)
        return super().launch(inputs)

    def _has_late_kill(self, inputs: ModelInputs) -> bool:
        is_late = inputs.tokens.positions[: inputs.num_tokens] >= LATE
        if not is_late.any():
            return False
        starts = inputs.rows.query_starts
        rows = [
            row for row in range(self.max_num_seqs) if is_late[starts[row] : starts[row + 1]].any()
        ]
        first_slots = self._page_table[rows, 0] * self.page_size
        return KILL_LATE in self._slots[first_slots]

    def _sample(self, inputs: ModelInputs, index: int, row: int) -> int:
        token = super()._sample(inputs, index, row) + self.script.get("arithmetic", 0)
        return token % NUM_GENERATED


def limits_of(config: EngineConfig) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=config.max_num_seqs or 8,
        max_num_batched_tokens=64,
        max_model_len=256,
        page_size=16,
        num_pages=16 * (config.max_num_seqs or 8),
        max_num_queued_reqs=config.max_num_queued_reqs or 100,
        max_consecutive_step_errors=config.max_consecutive_step_errors,
    )


def make_core(
    config: EngineConfig, script: Mapping[str, Any] | None = None, secret: bytes | None = None
) -> EngineCore:
    limits = limits_of(config)
    runner = ScriptedRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
    )
    runner.script = script or {}
    seed = runner.script.get("seed", config.seed)
    return EngineCore(runner, limits, CoreOptions(seed=seed, secret=secret))


def stand_still(go: str | None) -> None:
    while go is None or not Path(go).exists():
        time.sleep(POLL_S)


def raise_for_want_of_a_descriptor() -> None:
    """As `open_checkpoint` does."""
    try:
        raise OSError(errno.ENFILE, "Too many open files in system")
    except OSError:
        raise errors.CheckpointError("config.json cannot be read") from None


def read_until(gate: Path) -> None:
    """As from a disk that is next to useless."""
    with open("/dev/zero", "rb", buffering=0) as file:
        while not gate.exists():
            file.read(1)
            time.sleep(POLL_S)


def load(start: Start, on_phase: OnPhase) -> Serving:
    script: dict[str, Any] = json.loads(start.model or "{}")
    on_phase("load")
    time.sleep(script.get("load_s", 0.0))
    if "gate" in script:
        read_until(Path(script["gate"]))
    if "room" in script and not Path(script["room"]).exists():
        raise_for_want_of_a_descriptor()
    crash_once = Path(script.get("crash_once", ""))
    if script.get("crash") or Path(script.get("crash_while", "")).is_file():
        os.abort()
    if crash_once.is_file():
        crash_once.unlink(missing_ok=True)
        os.abort()
    if "fail" in script:
        raise getattr(errors, script["fail"])("the script says so")
    identity = ""
    if "identity" in script:
        identity = Path(script["identity"]).read_text()
    core = make_core(start.config, script, start.prefix_secret)
    told = script.get("told_arithmetic")
    named = None if told is None else fingerprint_of(told)
    return Serving(core=core, identity=identity, fingerprint=named)


def fingerprint_of(arithmetic: str) -> Fingerprint:
    return Fingerprint(
        checkpoint="tokens",
        arithmetic=arithmetic,
        activations="none",
        weights="none",
        kv="none",
        max_model_len=256,
        tokenizer="",
        template="",
        defaults="",
    )


if __name__ == "__main__":
    run_child(sys.argv[1:], load)
