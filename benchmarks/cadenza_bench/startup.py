"""From process start to the first token, in fresh processes, with cold and with warm caches. Cold:
an empty CADENZA_CACHE_DIR, so that every program is compiled; byte code and the page cache are warm
in both. Each start is a process of its own (`startup_probe`); the one that fills the warm cache is
not counted."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cadenza import EngineConfig
from cadenza.bench import OnStatus
from cadenza.bench.workloads import check_repeats
from cadenza.cli.report import Column, Columns, Machine, Result, Rows, Text, as_table, counted, keys
from cadenza.loading.build import find_configured
from cadenza_bench.fresh_process import run_in_fresh_process

Caches = Literal["cold", "warm"]
# Each ends when: the interpreter runs · libraries are imported and the device is found · the
# weights are in place · the programs are compiled · the first token is read.
PHASES = ("python", "imports", "load", "compile", "first_token")

_TIMEOUT_S = 600.0


StartTimes = tuple[float, ...]  # seconds of each of `PHASES`, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """All starts with one kind of cache."""

    caches: Caches
    starts: tuple[StartTimes, ...]

    @property
    def total_s(self) -> float:
        return sum(self._middle)

    @property
    def total_s_runs(self) -> list[float]:
        return [*map(sum, self.starts)]

    @property
    def phases_s(self) -> dict[str, float]:
        return dict(zip(PHASES, self._middle, strict=True))

    @property
    def _middle(self) -> StartTimes:
        """The start of the median time, or the shorter of two."""
        return sorted(self.starts, key=sum)[(len(self.starts) - 1) // 2]


def measure_startup(
    model: str | None, config: EngineConfig, *, repeats: int, report: OnStatus
) -> tuple[Startup, ...]:
    """Cold starts, then warm ones. Raises CheckpointError, ConfigError where the model cannot be
    found, or `repeats` is out of bounds, RunnerError where a start failed."""
    check_repeats(repeats)
    find_configured(model, config)
    argument = json.dumps({"model": model, "config": asdict(config)})
    cold: list[StartTimes] = []
    warm: list[StartTimes] = []
    with TemporaryDirectory() as folder:
        for repeat in range(repeats):
            report(f"cold start {repeat + 1} of {repeats}")
            cold.append(start_once(argument, Path(folder) / str(repeat)))
    with TemporaryDirectory() as folder:
        report("filling the cache")
        start_once(argument, Path(folder))
        for repeat in range(repeats):
            report(f"warm start {repeat + 1} of {repeats}")
            warm.append(start_once(argument, Path(folder)))
    return (Startup(caches="cold", starts=tuple(cold)), Startup(caches="warm", starts=tuple(warm)))


def start_once(argument: str, cache: Path) -> StartTimes:
    """One start in a fresh process. Raises RunnerError when it fails."""
    start_s = time.monotonic()
    at_s = run_in_fresh_process(
        "cadenza_bench.startup_probe",
        argument,
        what="a start",
        timeout_s=_TIMEOUT_S,
        env={"CADENZA_CACHE_DIR": str(cache), "JAX_COMPILATION_CACHE_DIR": ""},
    )
    ends = [start_s, *(at_s[phase] for phase in PHASES)]
    return tuple(end - begin for begin, end in pairwise(ends))


def _phase(name: str) -> Column:
    return Column(f"{name}_s", name.replace("_", " "), lambda found: found.phases_s[name])


_STARTUP: Columns = (
    Column("caches", "caches"),
    *keys("phases_s"),
    Column("total_s", "total"),
    *keys("total_s_runs"),
)


def startup_result(machine: Machine, found: Sequence[Startup]) -> Result:
    return Result(
        facts={"machine": machine},
        rows={"results": Rows(columns=_STARTUP, rows=found)},
        text=_startup_text(found),
    )


def _startup_text(found: Sequence[Startup]) -> Text:
    worst = Column("worst_s", "worst", lambda startup: max(startup.total_s_runs))
    yield as_table((_STARTUP[0], *map(_phase, PHASES), *_STARTUP[1:], worst), found)
    starts = counted(len(found[0].starts), "start")
    yield (
        f"the start of the median time of {starts}, and its phases; total: process start to the "
        f"first token"
    )
