"""`StepCosts`: the cost of a runner's steps, kept from one start to the next in `steps` of the
cache folder: timing takes seconds, and every later step corrects it (`core.step_cost`). A file's
name stands for all that the costs depend on: model, options, versions, kernels, processor, cores. A
file that is damaged, foreign or old is a miss."""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from cadenza import __version__
from cadenza.backends.base import Runner
from cadenza.batch.step_cost import StepCost
from cadenza.config import EngineLimits
from cadenza.engine.calibration import measure_step_cost
from cadenza.loading.identity import digest_of, replace_file
from cadenza.loading.memory import usable_cores
from cadenza.loading.planned_engine import PlannedEngine

logger = logging.getLogger(__name__)

MAX_AGE_S = 7 * 24 * 3600.0  # older costs are measured again

MAX_FILE_BYTES = 4096

Measure = Callable[[Runner, EngineLimits, Callable[[], float]], StepCost]


class StepCosts:
    """The costs of one engine's runners, in files whose names derive from `key`; without a `folder`
    they are measured at each start."""

    def __init__(
        self,
        folder: Path | None,
        key: str,
        *,
        measure: Measure = measure_step_cost,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._key = key
        self._measure = measure
        self._now_s = now_s

    def of(self, name: str, runner: Runner, limits: EngineLimits) -> StepCost:
        """The cost of the runner `name`, which is warm and computes nothing else now."""
        path = self._path(name, runner, limits)
        kept = None if path is None else self._read(path)
        if kept is not None:
            logger.debug("the costs of steps of an earlier start: %s", kept)
            return kept
        cost = self._measure(runner, limits, time.perf_counter)
        if path is not None:
            _write(path, cost)
        return cost

    def _path(self, name: str, runner: Runner, limits: EngineLimits) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / digest_of((self._key, name, runner.name, repr(limits)))

    def _read(self, path: Path) -> StepCost | None:
        try:
            if self._now_s() - path.stat().st_mtime > MAX_AGE_S:
                return None
            with path.open("rb") as file:
                checksum, _, content = file.read(MAX_FILE_BYTES).partition(b"\n")
        except OSError:
            return None
        if checksum.decode("ascii", "replace") != hashlib.sha256(content).hexdigest():
            return None
        try:
            cost = StepCost(**json.loads(content))
        except (ValueError, TypeError):
            return None
        is_sound = all(isinstance(ms, float) and isfinite(ms) for ms in asdict(cost).values())
        return cost if is_sound and min(asdict(cost).values()) > 0 else None


def open_step_costs(engine: PlannedEngine) -> StepCosts:
    checkpoint, setup, plan = engine.checkpoint, engine.setup(), engine.plan
    others = (plan.draft, plan.scorer)
    parts = (
        __version__,
        checkpoint.digest,
        *engine.backend.describe_arithmetic(setup.device, setup.ops, checkpoint),
        setup.arithmetic,
        setup.dtype,
        setup.quantization,
        setup.kv_cache_dtype,
        *(
            "" if each is None else f"{each.checkpoint.digest} {each.dtype} {each.quantization}"
            for each in others
        ),
        _processor(),
        str(usable_cores()),
    )
    folder = None if setup.cache_folder is None else setup.cache_folder / "steps"
    return StepCosts(folder, digest_of(parts))


def _processor(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    fields = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    parts = (line.partition(":") for line in lines)
    own = dict.fromkeys((key.strip(), value.strip()) for key, _, value in parts)
    return " ".join([platform.machine(), *(value for key, value in own if key in fields)])


def _write(path: Path, cost: StepCost) -> None:
    """Best effort: without a file the costs are measured again."""
    content = json.dumps(asdict(cost)).encode()
    try:
        replace_file(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    except OSError as error:
        logger.debug("the costs of steps cannot be kept: %s", error.strerror)
