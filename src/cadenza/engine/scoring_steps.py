"""`ScoringSteps`: the steps of the model that scores prompts (`core.scoring_queue`). A failed step
resets the scorer; the target's steps go on. Invariant: nothing that it does raises."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.backends.base import PromptScorer, Runner, StepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import StepOutput
from cadenza.config import EngineLimits
from cadenza.errors import RunnerError
from cadenza.scheduler.scoring_queue import ScoredStep, ScoringQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScorerModel:
    """Warm; its runner is a `PromptScorer`."""

    runner: Runner
    # those of its runner: the target's pages, a row for each prompt that is scored at the same
    # time, and a context and a token budget of its own
    limits: EngineLimits
    cost: StepCost | None = None  # of its steps; None where no step's time is bounded


class _Failed:
    def result(self) -> StepOutput:
        raise RunnerError("the step of the prompt scorer was not launched")


class ScoringSteps:
    """Of one scorer and its `queue`."""

    def __init__(self, model: PromptScorerModel, queue: ScoringQueue) -> None:
        assert isinstance(model.runner, PromptScorer), "the runner scores no prompts"
        self._scorer: PromptScorer = model.runner
        self._runner = model.runner
        self._queue = queue
        self._packer = Packer(model.limits, model.runner.vocab_size)

    def launch(self, scored: Batch) -> StepHandle:
        buckets = self._runner.token_buckets
        try:
            bucket = next(size for size in buckets if size >= scored.num_tokens)
            return self._runner.launch(self._packer.pack(scored, bucket))
        except Exception:
            logger.exception("launching a step of the prompt scorer failed")
            return _Failed()

    def read(self, step_id: int, handle: StepHandle) -> ScoredStep:
        """If the step failed, the scorer has lost all pages."""
        try:
            return ScoredStep(handle.result(), self._read_scores)
        except Exception:
            logger.exception("step %d of the prompt scorer failed", step_id)
            self.reset()
            return ScoredStep(None, self._read_scores)

    def apply(self, batch: Batch, step: ScoredStep) -> None:
        assert batch.scored is not None, "nothing was scored in the step"
        self._queue.apply(batch.scored, step)

    def reset(self) -> None:
        self._packer.forget_rows()
        try:
            self._runner.reset()
        except Exception:
            logger.exception("the prompt scorer cannot be reset; prompts are computed whole")

    def close(self) -> None:
        self._runner.close()

    def _read_scores(self, row: int, num_tokens: int, num_queries: int) -> Iterable[float] | None:
        try:
            return self._scorer.read_scores(row, num_tokens, num_queries).tolist()
        except Exception:
            logger.exception("the scores of a prompt cannot be read; it is computed whole")
            return None
