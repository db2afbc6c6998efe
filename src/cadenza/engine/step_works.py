"""`StepWorks`: makes what the steps of one engine do beside tokens, in the scheduler's order."""

from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.backends.base import ImageRunner, Runner, SpanRunner
from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import StepBound
from cadenza.config import EngineLimits
from cadenza.drafting.draft_ledger import OnDrafts
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.scheduler.scoring_queue import ScoringOptions, ScoringQueue
from cadenza.scheduler.span_queue import SpanQueue
from cadenza.scheduler.step_drafts import Drafter, StepDrafts
from cadenza.scheduler.step_work import StepWork
from cadenza.scheduler.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorks:
    """See `CoreOptions`."""

    runner: Runner
    limits: EngineLimits
    kv_cache: KVCacheManager
    step_bound: StepBound | None = None
    image_cost: ImageCost | None = None
    prompt_scorer: PromptScorerModel | None = None
    drafter: Drafter | None = None
    on_drafts: OnDrafts | None = None

    def make(self, turns: Turns) -> Iterator[StepWork]:
        """Images come before what needs them encoded, and drafts, which take what is left, last."""
        runner, limits = self.runner, self.limits
        if limits.images is not None:
            assert isinstance(runner, ImageRunner), "the runner encodes no images"
            yield ImageQueue(
                limits.images, self.kv_cache, turns.fair_share, runner.image_work, self.image_cost
            )
        shape = runner.span_shape if isinstance(runner, SpanRunner) else None
        if shape is not None and self.step_bound is not None:
            yield SpanQueue(shape, self.step_bound, limits.page_size)
        if self.prompt_scorer is not None:
            scorer = self.prompt_scorer
            options = ScoringOptions(limits=scorer.limits, cost=scorer.cost)
            yield ScoringQueue(options, self.kv_cache, turns.fair_share)
        yield StepDrafts(limits, self.kv_cache, self.drafter, self.on_drafts)
