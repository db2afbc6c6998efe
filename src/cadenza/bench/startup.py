"""From process start to the first token, in fresh processes, with cold and with warm caches.

Owns the processes and the phases. Cold means an empty CADENZA_CACHE_DIR, so that every program is
compiled; Python's own byte code and the system's page cache are warm in both. Invariant: each start
is a process of its own, and the one that fills the warm cache is not counted.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cadenza import EngineConfig
from cadenza.bench.probe import run_probe
from cadenza.errors import ConfigError
from cadenza.loading.build import find_checkpoint

Caches = Literal["cold", "warm"]
PHASES = ("python", "imports", "load", "compile", "first_token")
"""Each ends where it is named: the interpreter runs · libraries are imported and the device is
there · the weights are in place · the programs are warm · the first token is read."""

MAX_REPEATS = 1000
_TIMEOUT_S = 600.0
_PROBE = "cadenza.bench.startup_probe"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds of each of `PHASES`, in their order."""

    phases_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return sum(self.phases_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """All starts with one kind of cache."""

    caches: Caches
    starts: tuple[Start, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(start.total_s for start in self.starts)

    def phase_median_s(self, phase: str) -> float:
        index = PHASES.index(phase)
        return statistics.median(start.phases_s[index] for start in self.starts)


def measure_startup(
    model: str | None, config: EngineConfig, *, repeats: int, report: Report
) -> tuple[Startup, ...]:
    """Cold starts, then warm ones.

    Raises:
        CheckpointError, ConfigError: the model cannot be found, or `repeats` is out of bounds.
        RunnerError: a start failed.
    """
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats {repeats} must be a whole number from 1 to {MAX_REPEATS}")
    find_checkpoint(model, revision=config.revision)
    asked = json.dumps({"model": model, "config": asdict(config)})
    cold: list[Start] = []
    with TemporaryDirectory() as folder:
        for repeat in range(repeats):
            report(f"cold start {repeat + 1} of {repeats}")
            cold.append(start_once(asked, Path(folder) / str(repeat)))
    warm: list[Start] = []
    with TemporaryDirectory() as folder:
        report("filling the cache")
        start_once(asked, Path(folder))
        for repeat in range(repeats):
            report(f"warm start {repeat + 1} of {repeats}")
            warm.append(start_once(asked, Path(folder)))
    return (
        Startup(caches="cold", starts=tuple(cold)),
        Startup(caches="warm", starts=tuple(warm)),
    )


def start_once(asked: str, cache: Path) -> Start:
    """One fresh process. Raises RunnerError when it fails, with its last line."""
    start_s = time.monotonic()
    env = {"CADENZA_CACHE_DIR": str(cache)}
    at_s = run_probe(_PROBE, asked, what="a start", timeout_s=_TIMEOUT_S, env=env)
    ends = [start_s, *(at_s[phase] for phase in PHASES)]
    return Start(phases_s=tuple(end - begin for begin, end in pairwise(ends)))


def as_json(found: tuple[Startup, ...]) -> list[dict[str, object]]:
    """Of `results`: medians, and every start."""
    return [
        {
            "caches": each.caches,
            "total_s": each.median_s,
            "phases_s": {phase: each.phase_median_s(phase) for phase in PHASES},
            "total_s_runs": [start.total_s for start in each.starts],
        }
        for each in found
    ]
