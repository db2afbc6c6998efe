"""Mutants: each breaks one guarantee of the core, and the simulation's oracle must turn red.

Owns the mutants. A mutant here is a small subclass of the part it breaks, put in through
`simulation.Parts`; nothing is patched. Where the books would give a mutant away first, they are
left unaudited, to show that the streams alone betray it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.kv_cache_manager import KVCacheManager, Prefix
from cadenza.core.packing import Packer
from cadenza.core.page_pool import PagePool
from cadenza.core.scheduler import Scheduler
from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import ModelInputs, StepOutput
from cadenza.engine.core import EngineCore
from cadenza.events import Event, Finished
from tests.engine.simulation import REAL_PARTS, Parts, Scenario, Simulation

NUM_SEEDS = 40
WRONG_STREAM = r"is not the solo stream"


class ReadsOneSlotOff(FakeRunner):
    """Reads position p's KV at p + 1 in the row's first page."""

    def _sample(self, inputs: ModelInputs, index: int, row: int) -> int:
        first = int(self._page_table[row, 0]) * self.page_size
        page = slice(first, first + self.page_size)
        true = self._slots[page].copy()
        self._slots[page] = np.roll(true, -1)
        token_id = super()._sample(inputs, index, row)
        self._slots[page] = true
        return token_id


class ForgetsTheLastSampledToken(FakeRunner):
    """Feeds every row the first row's last sampled token."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        self._last_sampled[:] = self._last_sampled[0]
        return handle


class SwapsTwoRowsPages(Packer):
    """Tells the device that the first two new pages of a step belong to each other's rows."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        if len(inputs.page_updates) > 1:
            inputs.page_updates[[0, 1], 2] = inputs.page_updates[[1, 0], 2]
        return inputs


class SendsPagesOnce(Packer):
    """Leaves out the pages a row got after its first step."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        first = {update.row for update in batch.page_updates if not update.table_index}
        batch.page_updates = [update for update in batch.page_updates if update.row in first]
        return super().pack(batch, bucket, masks_follow=masks_follow)


class KeysFromRows(Packer):
    """Takes the randomness of a draw from the row it happens in."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        inputs.logits.keys[:, 0] += inputs.logits.rows.astype(np.uint32)
        return inputs


class KeepsTheLastOccupantsSampling(Packer):
    """Does not notice that a row changed hands."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        for entry in batch.entries:
            if self._occupant[entry.row] is not None:
                self._occupant[entry.row] = entry.sequence
        return super().pack(batch, bucket, masks_follow=masks_follow)


class FreesEarly(PagePool):
    """Gives a page back when the first of its holders lets go."""

    def free(self, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            page = self._pages[page_id]
            page.ref_count = min(page.ref_count, 1)
            if page.ref_count:
                super().free([page_id])


class LeaksOnePageInTen(PagePool):
    def free(self, page_ids: Iterable[int]) -> None:
        super().free(page_id for page_id in page_ids if page_id % 10)


class ForgetsToEvict(PagePool):
    """Hands out cached pages and leaves them findable."""

    def try_allocate(self, count: int) -> list[int] | None:
        self._on_evict = lambda _: None
        return super().try_allocate(count)


class UnpinsNothing(PagePool):
    def unpin(self, page_ids: Iterable[int]) -> None:
        """The pages stay pinned."""


class WithPool(KVCacheManager):
    """Pages from another kind of pool."""

    def __init__(self, pool: type[PagePool], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.pool = pool(self.pool.num_pages, self._forget)


class TakesOnePageTooMany(KVCacheManager):
    """Counts the page after a hit as found, too."""

    def find_prefix(self, sequence: Sequence) -> Prefix:
        hit = super().find_prefix(sequence)
        num_tokens = hit.num_tokens + 1
        if not hit.page_ids or num_tokens >= len(sequence.token_ids):
            return hit
        return replace(hit, num_tokens=num_tokens)


class PublishesAPageTooEarly(KVCacheManager):
    """Makes a page findable while its last token has no KV."""

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        super().publish(sequence, min(num_tokens + 1, len(sequence.token_ids)))


class IgnoresTheTokens(KVCacheManager):
    """Finds any published first page, whatever it holds."""

    def find_prefix(self, sequence: Sequence) -> Prefix:
        hit = super().find_prefix(sequence)
        if self.prefix_cache is None or hit.page_ids or not len(self.prefix_cache):
            return hit
        if len(sequence.token_ids) <= self.page_size:
            return hit
        page_id, content = next(iter(self.prefix_cache._pages.items()))
        return Prefix(
            page_ids=(page_id,),
            num_tokens=self.page_size,
            num_published=1,
            serial=content.serial,
            num_cached_tokens=self.page_size,
        )


class SharesThePartialPage(KVCacheManager):
    """Forks hold the page that both will write."""

    def find_prefix(self, sequence: Sequence) -> Prefix:
        prefix = super().find_prefix(sequence)
        if prefix.partial_page is None:
            return prefix
        page_ids = (*prefix.page_ids, prefix.partial_page)
        return replace(prefix, page_ids=page_ids, partial_page=None)


class CopiesNothing(Packer):
    """Forks start on an empty page."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        return replace(inputs, page_copies=inputs.page_copies[:0])


class SendsNoPagesOfThePreempted(Scheduler):
    """Readmits a preempted sequence as if the device knew its new pages."""

    def _preempt(self, sequence: Sequence) -> None:
        num_sent_pages = sequence.num_sent_pages
        super()._preempt(sequence)
        sequence.num_sent_pages = num_sent_pages


class RepeatsTheStreamOfThePreempted(Scheduler):
    """Starts a preempted sequence over from its prompt."""

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]


class EndsTwice(Scheduler):
    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        events = super().update(batch, output)
        return events + [event for event in events if isinstance(event, Finished)]


class KeepsOverrunTokens(Scheduler):
    """Hands out what a row sampled after its sequence had ended."""

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        ended = [entry.sequence for entry in batch.entries if entry.sequence.is_finished]
        last = {sequence.request_id: sequence for sequence in ended}
        events = super().update(batch, output)
        for sequence in last.values():
            events.append(Finished(**_end_of(sequence)))  # type: ignore[arg-type]
        return events


class SkipsAToken(Scheduler):
    """Computes a prompt's chunk one token short and counts it whole."""

    def _add_to_batch(self, batch: Batch, entry: BatchEntry) -> None:
        super()._add_to_batch(batch, entry)
        if entry.num_new_tokens > 2 and not entry.num_choices:
            entry.num_new_tokens -= 1
            batch.num_tokens -= 1


def _end_of(sequence: Sequence) -> dict[str, object]:
    return {
        "request_id": sequence.request_id,
        "finish_reason": "length",
        "stop_token_id": None,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_generated_tokens": sequence.num_generated_tokens,
        "num_cached_tokens": 0,
    }


def ignore_the_books(_: EngineCore) -> None:
    """Audits nothing."""


STREAM_MUTANTS: dict[str, Parts] = {
    mutant.__name__: parts
    for mutant, parts in [
        (ReadsOneSlotOff, Parts(runner=ReadsOneSlotOff)),
        (ForgetsTheLastSampledToken, Parts(runner=ForgetsTheLastSampledToken)),
        (SwapsTwoRowsPages, Parts(packer=SwapsTwoRowsPages)),
        (SendsPagesOnce, Parts(packer=SendsPagesOnce)),
        (KeysFromRows, Parts(packer=KeysFromRows)),
        (KeepsTheLastOccupantsSampling, Parts(packer=KeepsTheLastOccupantsSampling)),
        (FreesEarly, Parts(kv_cache=partial(WithPool, FreesEarly))),
        (ForgetsToEvict, Parts(kv_cache=partial(WithPool, ForgetsToEvict))),
        (TakesOnePageTooMany, Parts(kv_cache=TakesOnePageTooMany)),
        (PublishesAPageTooEarly, Parts(kv_cache=PublishesAPageTooEarly)),
        (SharesThePartialPage, Parts(kv_cache=SharesThePartialPage)),
        (CopiesNothing, Parts(packer=CopiesNothing)),
        (IgnoresTheTokens, Parts(kv_cache=IgnoresTheTokens)),
        (SendsNoPagesOfThePreempted, Parts(scheduler=SendsNoPagesOfThePreempted)),
        (SkipsAToken, Parts(scheduler=SkipsAToken)),
    ]
}
OTHER_MUTANTS: dict[str, tuple[Parts, str]] = {
    mutant.__name__: (parts, fault)
    for mutant, parts, fault in [
        (FreesEarly, Parts(kv_cache=partial(WithPool, FreesEarly)), r"holders, counted"),
        (LeaksOnePageInTen, Parts(kv_cache=partial(WithPool, LeaksOnePageInTen)), r"holders"),
        (
            UnpinsNothing,
            Parts(kv_cache=partial(WithPool, UnpinsNothing)),
            r"stayed pinned|does not come to rest",
        ),
        (
            RepeatsTheStreamOfThePreempted,
            Parts(scheduler=RepeatsTheStreamOfThePreempted),
            r"token \d+ came where \d+ was due",
        ),
        (EndsTwice, Parts(scheduler=EndsTwice), r"KeyError|an event after its end"),
        (
            KeepsOverrunTokens,
            Parts(scheduler=KeepsOverrunTokens),
            r"KeyError|an event after its end",
        ),
    ]
}


def faults_of(parts: Parts, *, expected: str, audit: Callable[[EngineCore], None]) -> list[str]:
    """What the oracle says of an engine with `parts`, seed after seed, until it says `expected`."""
    faults: list[str] = []
    for seed in range(NUM_SEEDS):
        scenario = Scenario(seed=seed, num_steps=60)
        simulation = Simulation(scenario, loop="overlap", parts=parts, audit=audit)
        try:
            simulation.run().verify()
        except (AssertionError, IndexError, KeyError) as fault:
            faults.append(f"{type(fault).__name__}: {fault}")
            if re.search(expected, faults[-1]):
                break
    return faults


def test_the_real_parts_have_no_fault() -> None:
    assert faults_of(REAL_PARTS, expected="", audit=ignore_the_books) == []


@pytest.mark.parametrize("name", STREAM_MUTANTS)
def test_the_streams_betray_the_mutant_that(name: str) -> None:
    faults = faults_of(STREAM_MUTANTS[name], expected=WRONG_STREAM, audit=ignore_the_books)
    assert faults, f"{name} was not caught"
    assert re.search(WRONG_STREAM, faults[-1]), faults


@pytest.mark.parametrize("name", OTHER_MUTANTS)
def test_the_books_or_the_events_betray_the_mutant_that(name: str) -> None:
    parts, expected = OTHER_MUTANTS[name]
    faults = faults_of(parts, expected=expected, audit=EngineCore.check_invariants)
    assert faults, f"{name} was not caught"
    assert re.search(expected, faults[-1]), faults
