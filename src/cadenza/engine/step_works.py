"""`StepWorks`: makes what the steps of one engine do beside tokens, in the scheduler's order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cadenza.backends.base import ImageRunner, Runner, SpanRunner
from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import StepBound
from cadenza.config import EngineLimits
from cadenza.drafting.draft_ledger import OnDrafts
from cadenza.drafting.drafts import DRAFT_FIGURES
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.figures import Figure
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.image_queue import IMAGE_FIGURES, ImageEncoding, ImageQueue
from cadenza.scheduler.scoring_queue import SCORING_FIGURES, ScoringOptions, ScoringQueue
from cadenza.scheduler.span_queue import SpanQueue
from cadenza.scheduler.step_drafts import Drafter, StepDrafts
from cadenza.scheduler.step_work import StepWork
from cadenza.scheduler.turns import Turns

# Of all works that an engine may have.
WORK_FIGURES: tuple[Figure[Any], ...] = (*DRAFT_FIGURES, *IMAGE_FIGURES, *SCORING_FIGURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """Of what steps do beside tokens."""

    # what encoding costs, where images are encoded; None if it was not measured
    image_cost: ImageCost | None = None
    # scores prompts, so that they can be pruned; closed with the engine
    prompt_scorer: PromptScorerModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorks:
    """See `CoreOptions`."""

    runner: Runner
    limits: EngineLimits
    kv_cache: KVCacheManager
    options: WorkOptions
    step_bound: StepBound | None = None
    drafter: Drafter | None = None
    on_drafts: OnDrafts | None = None

    def make(self, turns: Turns) -> Iterator[StepWork]:
        """Images come before what needs them encoded, and drafts, which take what is left, last."""
        runner, limits, options = self.runner, self.limits, self.options
        if limits.images is not None:
            assert isinstance(runner, ImageRunner), "the runner encodes no images"
            encoder = ImageEncoding(runner.check_image, runner.image_work, options.image_cost)
            yield ImageQueue(limits.images, self.kv_cache, turns.fair_share, encoder)
        shape = runner.span_shape if isinstance(runner, SpanRunner) else None
        if shape is not None and self.step_bound is not None:
            yield SpanQueue(shape, self.step_bound, limits.page_size)
        scorer = options.prompt_scorer
        if scorer is not None:
            scoring = ScoringOptions(limits=scorer.limits, cost=scorer.cost)
            yield ScoringQueue(scoring, self.kv_cache, turns.fair_share)
        yield StepDrafts(limits, self.kv_cache, self.drafter, self.on_drafts)
