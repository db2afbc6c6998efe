"""Warm runners of a model, and of what drafts for it, for one engine after another of a test."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.loading.build import Runners, load_runners, open_planned
from cadenza.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class WarmRunners:
    runners: Runners
    limits: EngineLimits
    speculation: SpeculativeConfig | None

    def new_core(self, options: CoreOptions | None = None, **limits: Any) -> EngineCore:
        """An engine that begins with an empty state, and drafts whatever that costs.

        `limits` are the scheduler's, within those of the runners.
        """
        draft = self.runners.draft
        for runner in (self.runners.target, *([] if draft is None else [draft.runner])):
            runner.reset()
        return EngineCore(
            self.runners.target,
            replace(self.limits, max_num_queued_reqs=64, **limits),
            replace(
                options or CoreOptions(),
                speculation=self.speculation,
                draft_model=draft,
                reserved_output=0.0,
            ),
        )


@contextmanager
def warm_runners(
    folder: Path | None, speculation: SpeculativeConfig | None, **options: Any
) -> Iterator[WarmRunners]:
    """Of the model in `folder`, or of the bundled one. KV that was not written is NaN."""
    config = EngineConfig(speculative_config=speculation, **options)
    engine = open_planned(folder, config)
    with closing(load_runners(engine, fill=float("nan"))) as runners:
        runners.warmup()
        yield WarmRunners(runners, engine.plan.limits, speculation)
