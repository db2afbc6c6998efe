"""`PlannedEngine`: a model, the plan of its engine and its options; loads the runners. Nothing that
streams depend on follows from the draft model; which tokens a sparse prefill keeps follows from the
prompt scorer."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.backends.base import Backend, Capability, Runner, RunnerSetup
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.model_drafter import DraftModel
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.identity import Identity, identify
from cadenza.loading.weight_cache import packed_weights_file


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


def cache_folder() -> Path:
    """`CADENZA_CACHE_DIR`, or `cadenza` in the user's cache folder."""
    chosen = os.environ.get("CADENZA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cadenza"
