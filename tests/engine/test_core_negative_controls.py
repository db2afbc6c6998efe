"""Negative controls of the simulation's oracle: six faults, each of which it must catch.

A fault here is a small subclass of the part that it breaks, put in through `simulation.Parts`.
Where the invariants would show it first, they are not checked: the streams alone must. The faults
in `tests/mutants` are the others of this kind.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.events import Event, Finished
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_pool import PagePool
from cadenza.kv.prefix_cache import Prefix
from cadenza.scheduler.scheduler import Scheduler
from tests.engine.scenario import Scenario
from tests.engine.simulation import Parts, Simulation

NUM_SEEDS = 40
WRONG_STREAM = r"is not the solo stream"


class SwapsTwoRowsPages(Packer):
    """Tells the device that the first two new pages of a step belong to each other's rows."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        if len(inputs.page_updates) > 1:
            inputs.page_updates[[0, 1], 2] = inputs.page_updates[[1, 0], 2]
        return inputs


class LeaksOnePageInTen(PagePool):
    def free(self, page_ids: Iterable[int]) -> None:
        super().free(page_id for page_id in page_ids if page_id % 10)


class UnpinsNothing(PagePool):
    def unpin(self, page_ids: Iterable[int]) -> None:
        """The pages stay pinned."""


class WithPool(KVCacheManager):
    """Pages from another kind of pool."""

    def __init__(self, pool: type[PagePool], limits: EngineLimits, secret: bytes) -> None:
        super().__init__(limits, secret)
        self.pool = pool(self.pool.num_pages, self._forget)


class TakesOnePageTooMany(KVCacheManager):
    """Counts the page after a hit as found, too."""

    def find_prefix(self, sequence: Sequence) -> Prefix:
        hit = super().find_prefix(sequence)
        num_tokens = hit.num_tokens + 1
        if not hit.page_ids or num_tokens >= len(sequence.token_ids):
            return hit
        return replace(hit, num_tokens=num_tokens)


class RepeatsTheStreamOfThePreempted(Scheduler):
    """Starts a preempted sequence over from its prompt."""

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]


class KeepsOverrunTokens(Scheduler):
    """Hands out what a row sampled after its sequence had ended."""

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        ended = [entry.sequence for entry in batch.entries if entry.sequence.is_finished]
        last = {sequence.request_id: sequence for sequence in ended}
        events = super().update(batch, output)
        for sequence in last.values():
            events.append(Finished(**_end_of(sequence)))  # type: ignore[arg-type]
        return events


def _end_of(sequence: Sequence) -> dict[str, object]:
    return {
        "request_id": sequence.request_id,
        "finish_reason": "length",
        "stop_token_id": None,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_generated_tokens": sequence.num_generated_tokens,
        "num_cached_tokens": 0,
    }


FAULTS: dict[str, tuple[Parts, str]] = {
    "pages of two rows swapped": (Parts(packer=SwapsTwoRowsPages), WRONG_STREAM),
    "a page too many found": (Parts(kv_cache=TakesOnePageTooMany), WRONG_STREAM),
    "pages leaked": (Parts(kv_cache=partial(WithPool, LeaksOnePageInTen)), r"holders"),
    "pages stay pinned": (
        Parts(kv_cache=partial(WithPool, UnpinsNothing)),
        r"stayed pinned|nothing was computed",
    ),
    "preempted streams repeated": (
        Parts(scheduler=RepeatsTheStreamOfThePreempted),
        r"token \d+ came where \d+ was due",
    ),
    "an event after the end": (
        Parts(scheduler=KeepsOverrunTokens),
        r"KeyError|an event after its end",
    ),
}


def check_nothing(_: EngineCore) -> None:
    """No invariant is checked."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_oracle_catches_the_fault(name: str) -> None:
    parts, expected = FAULTS[name]
    audit = check_nothing if expected == WRONG_STREAM else EngineCore.check_invariants
    faults: list[str] = []
    for seed in range(NUM_SEEDS):
        scenario = Scenario(seed=seed, num_steps=60)
        try:
            Simulation(scenario, loop="overlap", parts=parts, audit=audit).run().verify()
        except (AssertionError, IndexError, KeyError) as fault:
            faults.append(f"{type(fault).__name__}: {fault}")
            if re.search(expected, faults[-1]):
                return
    pytest.fail(f"{name} was not caught: {faults}")
