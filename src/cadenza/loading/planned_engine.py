"""`PlannedEngine`: a model, the plan of its engine and its options; loads the runners, and names
the files that it keeps. Nothing that streams depend on follows from the draft model; which tokens a
sparse prefill keeps follows from the prompt scorer."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.backends.base import Backend, Capability, Runner, RunnerSetup
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.model_drafter import DraftModel
from cadenza.engine.page_folder import PageFolder
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.errors import show_size
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.identity import Identity, identify

logger = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES = 16 << 30  # of `--weight-cache-bytes`
DEFAULT_FOLDER_BYTES = 8 << 30  # of `--prefix-cache-disk-bytes`
MIN_WEIGHT_BYTES = 64 << 20  # smaller models are quantised in a fraction of a second

FREE_SHARE = 0.1  # of the disk stays free

ABANDONED_S = 3600.0  # an incomplete file of this age has no writer any more

_SUFFIX = ".packed"


def packed_weights_file(
    setup: RunnerSetup,
    config: EngineConfig,
    weight_bytes: int,
    identify: Callable[[], Identity],
) -> Path | None:
    """The file for the packed weights of `setup`; None if they are not cached."""
    max_bytes = max_cache_bytes(config)
    if setup.quantization == "none" or setup.cache_folder is None:
        return None
    if not MIN_WEIGHT_BYTES <= weight_bytes <= max_bytes:
        return None
    folder = setup.cache_folder / "weights"
    path = folder / f"{identify().digest('weights')}{_SUFFIX}"
    if path.exists() or _make_room(folder, max_bytes, weight_bytes):
        return path
    return None


def max_cache_bytes(config: EngineConfig) -> int:
    chosen = config.weight_cache_bytes
    return DEFAULT_CACHE_BYTES if chosen is None else chosen


def _make_room(folder: Path, max_bytes: int, num_bytes: int) -> bool:
    """Removes the least recently used files; whether `num_bytes` more may be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(folder)
        files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        sizes = {path: path.stat().st_size for path in files}
        disk = shutil.disk_usage(folder)
    except OSError as error:
        logger.debug("quantised weights are not kept: %s", error.strerror)
        return False
    kept, free = sum(sizes.values()), disk.free
    for path in files:
        if kept + num_bytes <= max_bytes:
            break
        with suppress(OSError):
            path.unlink()
        kept, free = kept - sizes[path], free + sizes[path]
    if free - num_bytes >= FREE_SHARE * disk.total:
        return True
    logger.debug("quantised weights are not kept: the disk has %s left", show_size(free))
    return False


def _remove_abandoned(folder: Path) -> None:
    oldest = time.time() - ABANDONED_S
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(_SUFFIX) and entry.stat().st_mtime < oldest:
                with suppress(OSError):
                    os.unlink(entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """`config.backend` is in `backends`."""

    checkpoint: Checkpoint
    plan: EnginePlan
    config: EngineConfig
    backends: Backends = field(default_factory=lambda: BACKENDS)

    @property
    def backend(self) -> Backend:
        return find_backend(self.config.backend, self.backends)

    def setup(self, *, fill: float | None = None) -> RunnerSetup:
        """How the backend loads the model's runner; KV slots start as `fill`, or unwritten."""
        plan, config = self.plan, self.config
        return RunnerSetup(
            limits=plan.limits,
            device=config.device,
            ops=config.ops,
            dtype=plan.dtype,
            quantization=plan.quantization,
            kv_cache_dtype=plan.kv_cache_dtype,
            arithmetic=config.arithmetic,
            fill=fill,
            cache_folder=cache_folder(),
            num_devices=config.tensor_parallel_size or 1,
            num_image_slots=plan.num_image_slots,
            capabilities=self._capabilities,
        )

    @property
    def _capabilities(self) -> frozenset[Capability]:
        asked: dict[Capability, bool] = {
            "page_copies": self.config.prefix_cache_disk is not None,
            "hidden_states": self.plan.keeps_hidden,
            "sparse_prompts": self.config.sparse_prompts is not None,
        }
        return frozenset(each for each, is_asked in asked.items() if is_asked)

    def load_runner(self, *, fill: float | None = None) -> Runner:
        """Loads the weights and compiles nothing."""
        return self._load(self.checkpoint, self.setup(fill=fill), self.plan.weight_bytes)

    def load_warm_runner(self, *, fill: float | None = None) -> Runner:
        """Compiles all programs."""
        runner = self.load_runner(fill=fill)
        runner.warmup()
        return runner

    def load_draft(self, target: Runner, *, fill: float | None = None) -> DraftModel | None:
        """The draft model beside `target`, the model's own runner; None if the plan has none."""
        draft = self.plan.draft
        if draft is None:
            return None
        setup = replace(
            self.setup(fill=fill),
            limits=self.plan.draft_limits,
            dtype=draft.dtype,
            quantization=draft.quantization,
            kv_of=target if draft.shares_kv else None,
            hidden_of=target if draft.reads_hidden else None,
            num_image_slots=self.plan.num_image_slots if draft.shares_kv else 0,
            num_devices=1,
            capabilities=self._capabilities & {"sparse_prompts"}
            if draft.shares_kv
            else frozenset(),
        )
        return DraftModel(
            runner=self._load(draft.checkpoint, setup, draft.weight_bytes),
            limits=self.plan.draft_limits,
            shares_kv=draft.shares_kv,
            reads_hidden=draft.reads_hidden,
        )

    def load_scorer(self, *, fill: float | None = None) -> PromptScorerModel | None:
        """None if the plan has none."""
        scorer = self.plan.scorer
        if scorer is None:
            return None
        runner = self._load(scorer.checkpoint, self.scorer_setup(fill=fill), scorer.weight_bytes)
        return PromptScorerModel(runner=runner, limits=self.plan.scorer_limits)

    def scorer_setup(self, *, fill: float | None = None) -> RunnerSetup:
        scorer = self.plan.scorer
        assert scorer is not None, "the plan has a scorer"
        return replace(
            self.setup(fill=fill),
            limits=self.plan.scorer_limits,
            dtype=scorer.dtype,
            quantization=scorer.quantization,
            num_image_slots=0,
            num_devices=1,
            capabilities=frozenset({"scores"}),
        )

    def identity(self) -> Identity:
        """What decides the bits of pages, streams and answers. Reads all weights once, unless their
        digest is in the cache folder."""
        scorer = self.plan.scorer
        scoring = scorer and self._identify(scorer.checkpoint, self.scorer_setup())
        own = self._identify(self.checkpoint, self.setup())
        return own.answering(self.checkpoint, self.config, scoring)

    def _identify(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Identity:
        return identify(checkpoint, setup, self.backend, self.plan.traits)

    def open_page_folder(self) -> PageFolder | None:
        """The folder of `--prefix-cache-disk` for the runner's pages; None without one. Reads all
        weights once, unless their digest is cached. Raises ConfigError if it cannot be used."""
        if self.config.prefix_cache_disk is None:
            return None
        folder, identity = Path(self.config.prefix_cache_disk), self.identity()
        return PageFolder(folder, identity.digest("pages"), max_folder_bytes(self.config))

    def kept_weights(self) -> Path | None:
        """The cached file of packed weights that later loads read; None without one."""
        kept = self._kept_weights(self.checkpoint, self.setup(), self.plan.weight_bytes)
        return kept if kept is not None and kept.exists() else None

    def _load(self, checkpoint: Checkpoint, setup: RunnerSetup, weight_bytes: int) -> Runner:
        kept = self._kept_weights(checkpoint, setup, weight_bytes)
        return self.backend.load_runner(checkpoint, replace(setup, packed_weights=kept))

    def _kept_weights(
        self, checkpoint: Checkpoint, setup: RunnerSetup, weight_bytes: int
    ) -> Path | None:
        if not self.plan.traits.keeps_packed_weights:
            return None
        return packed_weights_file(
            setup, self.config, weight_bytes, lambda: self._identify(checkpoint, setup)
        )


def max_folder_bytes(config: EngineConfig) -> int:
    return config.prefix_cache_disk_bytes or DEFAULT_FOLDER_BYTES


def cache_folder() -> Path:
    """`CADENZA_CACHE_DIR`, or `cadenza` in the user's cache folder."""
    chosen = os.environ.get("CADENZA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cadenza"
