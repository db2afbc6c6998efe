"""How fast a checkpoint's weights are loaded, beside how fast the page cache gives their bytes.

Owns the runs and their figures; a run is `load_probe`'s, in a process of its own. Invariant: the
page cache is warm, and every load has readings of the same files right before it.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cadenza import EngineConfig
from cadenza.bench.probe import run_probe
from cadenza.errors import ConfigError
from cadenza.loading.build import find_checkpoint

MAX_REPEATS = 1000
ALLOWED_BYTES = 500_000_000
"""What a process may hold while it loads, beside the weights and the largest tensor."""

_TIMEOUT_S = 3600.0
_PROBE = "cadenza.bench.load_probe"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a probe found; seconds of each run."""

    file_bytes: int
    weight_bytes: int
    largest_tensor_bytes: int
    num_threads: int
    load_s: tuple[float, ...]
    read_s: tuple[float, ...]  # into memory that is there
    read_new_s: tuple[float, ...]  # into memory that the system has yet to give
    peak_private_bytes: int | None

    @property
    def load_gb_s(self) -> float:
        return self._gb_s(self.load_s)

    @property
    def read_gb_s(self) -> float:
        return self._gb_s(self.read_s)

    @property
    def read_new_gb_s(self) -> float:
        return self._gb_s(self.read_new_s)

    @property
    def share_of_read(self) -> float:
        return _median_ratio(self.read_s, self.load_s)

    @property
    def share_of_read_new(self) -> float:
        return _median_ratio(self.read_new_s, self.load_s)

    @property
    def allowed_private_bytes(self) -> int:
        return self.weight_bytes + self.largest_tensor_bytes + ALLOWED_BYTES

    def _gb_s(self, runs_s: tuple[float, ...]) -> float:
        return self.file_bytes / statistics.median(runs_s) / 1e9


def measure_load(
    model: str | Path | None, config: EngineConfig, *, repeats: int, report: Report
) -> Load:
    """One load to warm the page cache and to watch its memory, then `repeats` that are timed.

    Raises:
        CheckpointError, ConfigError: the model cannot be found, or `repeats` is out of bounds.
        RunnerError: the loading process failed.
    """
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats {repeats} must be a whole number from 1 to {MAX_REPEATS}")
    find_checkpoint(model, revision=config.revision)
    report(f"loading {repeats + 1} times")
    name = None if model is None else str(model)
    asked = json.dumps({"model": name, "config": asdict(config), "repeats": repeats})
    found = run_probe(_PROBE, asked, what="loading", timeout_s=_TIMEOUT_S)
    for name in ("load_s", "read_s", "read_new_s"):
        found[name] = tuple(found[name])
    return Load(**found)


def as_json(found: Load) -> dict[str, object]:
    """Of `results`: what was counted, medians, and every run."""
    return {
        **asdict(found),
        "load_gb_s": found.load_gb_s,
        "read_gb_s": found.read_gb_s,
        "read_new_gb_s": found.read_new_gb_s,
        "share_of_read": found.share_of_read,
        "share_of_read_new": found.share_of_read_new,
        "allowed_private_bytes": found.allowed_private_bytes,
    }


def _median_ratio(above_s: tuple[float, ...], below_s: tuple[float, ...]) -> float:
    """Of runs that were measured side by side."""
    pairs = zip(above_s, below_s, strict=True)
    return statistics.median(above / below for above, below in pairs)
