"""Warm runners of a model, and of what drafts for it, for one engine after another of a test."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.config import EngineConfig, EngineLimits
from cadenza.drafting.drafts import DraftCounts
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Finished, Token
from cadenza.loading.build import Runners, load_runners, open_planned
from cadenza.request import Request
from cadenza.speculative_config import SpeculativeConfig

Streams = dict[tuple[int, int], list[Any]]


class Played(NamedTuple):
    """Everything that was told of each stream, the engine's drafts, how often it preempted, and
    how many tokens of each request had been drafts."""

    streams: Streams
    counts: DraftCounts
    num_preemptions: int
    accepted: Counter[int]


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

    def play(
        self,
        requests: Sequence[Request],
        options: CoreOptions | None = None,
        *,
        one_by_one: bool = False,
        **limits: Any,
    ) -> Played:
        """In one engine; `one_by_one`, no two requests are in it together."""
        core = self.new_core(options, **limits)
        played = Played({}, core.draft_counts, 0, Counter())
        for request in requests:
            core.submit(request)
            if one_by_one:
                _drain(core, played)
        _drain(core, played)
        return played._replace(num_preemptions=core.scheduler.num_preemptions)


def _drain(core: EngineCore, played: Played) -> None:
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, Token):
                told: Any = (event.token_id, event.logprobs)
                played.accepted[event.request_id] += event.is_draft
            elif isinstance(event, Finished):
                told = (event.finish_reason, event.error, event.num_generated_tokens)
            else:
                continue
            played.streams.setdefault((event.request_id, event.sample), []).append(told)
        core.check_invariants()


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
