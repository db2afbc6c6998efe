"""Drafts of a head over the target's hidden states: right ones stay, and wrong ones change nothing.

The head is a token-storing runner too. What it stores of a token is the history that its hidden
state stands for: of a known token the target's tokens before it, read at launch; of a token that it
drew itself, its own. Its result is right only if every token before was stored, those that the
target knows from the target's own, so that an accepted draft that is not computed again is seen.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineLimits
from cadenza.core.admission import Admission
from cadenza.core.drafts import Drafting
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.scheduler import Scheduler, SchedulerOptions
from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import LAST_SAMPLED, ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import DraftModel, ModelDrafter
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from tests.engine.simulation import (
    VOCAB_SIZE,
    ObservedRunner,
    Parts,
    Scenario,
    Simulation,
    replayable,
    run_requests,
)
from tests.engine.test_draft_models import LIMITS, Erring, fake_of
from tests.engine.test_speculation import AlwaysDrafts, audit_published_pages

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 300))]
NUM_STEPS = 60
HERE = "tests/engine/test_mtp_drafts.py"
SPOILT = [-1]


@dataclass(slots=True, eq=False)
class Entry:
    """What a head stores of a token: the tokens up to it, and whether the target knew them."""

    history: list[int]
    is_known: bool


@dataclass(slots=True, eq=False, kw_only=True)
class FakeHead(FakeRunner):
    target: FakeRunner
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])

    def reset(self) -> None:
        FakeRunner.reset(self)
        self.entries = {}

    def slot_of(self, row: int, position: int) -> int:
        page = int(self._page_table[row, position // self.page_size])
        return page * self.page_size + position % self.page_size

    def _store(self, inputs: ModelInputs, row: int) -> None:
        FakeRunner._store(self, inputs, row)
        tokens, starts = inputs.tokens, inputs.rows.query_starts
        for index in range(starts[row], starts[row + 1]):
            position, slot = int(tokens.positions[index]), int(tokens.slots[index])
            assert position > 0, "there is no hidden state before the first token"
            is_known = int(tokens.ids[index]) != LAST_SAMPLED
            token = int(self._slots[slot])
            before = self._before(row, position, is_known=is_known)
            self.entries[slot] = Entry([*before, token], is_known)

    def _before(self, row: int, position: int, *, is_known: bool) -> list[int]:
        """The tokens that the hidden state before a position stands for."""
        if is_known:
            slots = [self.slot_of(row, at) for at in range(position)]
            return self.target._slots[slots].tolist()
        own = self.entries.get(self.slot_of(row, position - 1))
        return SPOILT if own is None else own.history

    def _history(self, inputs: ModelInputs, index: int, row: int) -> list[int]:
        last = int(inputs.tokens.positions[inputs.logits.token_indices[index]])
        found = [self.entries.get(self.slot_of(row, at)) for at in range(1, last + 1)]
        history = found[-1].history if found and found[-1] else SPOILT
        num_known = 0
        for at, entry in enumerate(found, 1):
            if entry is None or entry.history != history[: at + 1]:
                return [*history, *SPOILT]
            if entry.is_known and num_known < at - 1:
                return [*history, *SPOILT]  # behind a token that the head drew and kept
            num_known += entry.is_known
        return list(history)  # the caller adds to it


def head_over(target: FakeRunner, limits: EngineLimits) -> FakeHead:
    return FakeHead(
        target=target,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
    )


def parts_with_head(*, error: float) -> Parts:
    """An engine whose sequences draft with a head; `error` is the share of its wrong tokens."""
    targets: list[FakeRunner] = []

    def make_runner(**sizes: Any) -> FakeRunner:
        targets.append(ObservedRunner(**sizes))
        return targets[-1]

    class HeadScheduler(Scheduler):
        def __init__(
            self,
            limits: EngineLimits,
            kv_cache: KVCacheManager,
            admission: Admission,
            options: SchedulerOptions,
        ) -> None:
            head = head_over(targets[-1], limits)
            rng = random.Random(f"errors {limits.num_pages}")
            runner = Erring(head, error, rng) if error else head
            model = DraftModel(
                runner=runner,  # type: ignore[arg-type]
                limits=limits,
                shares_kv=False,
                reads_hidden=True,
            )
            self.drafter = ModelDrafter(model, kv_cache, lambda: 0.0)
            super().__init__(limits, kv_cache, admission, replace(options, drafter=self.drafter))

        def add(self, sequence: Sequence) -> None:
            rng = random.Random(f"{sequence.request_id} {sequence.sample}")
            kind = rng.choice([AlwaysDrafts, AlwaysDrafts, Drafting, None])
            if kind is not None:
                sequence.drafting = kind(source=None, most=rng.choice([1, 3, 5]))
            super().add(sequence)

    return Parts(runner=make_runner, scheduler=HeadScheduler)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_that_is_right_is_always_accepted(seed: int) -> None:
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}' -k '{seed}'"):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS, hang_up=0.0)
        parts = parts_with_head(error=0.0)
        record = Simulation(
            scenario, loop="overlap", parts=parts, audit=audit_published_pages
        ).run()
        record.verify()
        ends = sum(end.finish_reason == "stop" for end in record.finished.values())
        counts = record.engine.scheduler.draft_counts
        # A stop token ends a stream within its drafts; none behind it counts as accepted.
        assert counts.num_draft_tokens - counts.num_accepted_tokens <= ends


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_are_exact_whatever_a_head_draws(seed: int) -> None:
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}' -k '{seed}'"):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS)
        parts = parts_with_head(error=(0.1, 0.4, 1.0)[seed % 3])
        for loop in ("plain", "overlap"):
            Simulation(scenario, loop=loop, parts=parts, audit=audit_published_pages).run().verify()


CONFIG = SpeculativeConfig(method="mtp", num_speculative_tokens=4)


def drafts_of(*sizes: int, reads_hidden: bool = True, error: float = 0.0) -> tuple[int, int, int]:
    """Drafts of streams with prompts of these sizes, how many stayed, and the number of steps."""
    target = fake_of(LIMITS)
    head = head_over(target, LIMITS) if reads_hidden else fake_of(LIMITS)
    runner = Erring(head, error, random.Random(5)) if error else head
    model = DraftModel(
        runner=runner,  # type: ignore[arg-type]
        limits=LIMITS,
        shares_kv=False,
        reads_hidden=True,
    )
    engine = EngineCore(target, LIMITS, CoreOptions(speculation=CONFIG, draft_model=model))
    requests = [
        Request(
            prompt_token_ids=tuple(range(seed, seed + size)),
            params=SamplingParams(max_tokens=60, seed=seed, ignore_eos=True),
        )
        for seed, size in enumerate(sizes)
    ]
    record = run_requests(engine, requests)
    record.verify()
    counts = engine.scheduler.draft_counts
    return counts.num_draft_tokens, counts.num_accepted_tokens, record.num_steps


def test_a_prompt_of_one_token_is_drafted_behind_its_first_answer() -> None:
    num_drafts, num_accepted, num_steps = drafts_of(1)
    assert num_drafts == num_accepted
    assert num_steps < 16


def test_a_model_that_needs_the_first_token_would_be_noticed() -> None:
    """The negative control: a second model of its own does not see the first token here."""
    num_drafts, num_accepted, _ = drafts_of(9, 1, 30, reads_hidden=False)
    assert num_drafts > 20 > num_accepted


def test_a_head_that_errs_is_right_again_behind_its_errors() -> None:
    num_drafts, num_accepted, _ = drafts_of(9, 1, 30, error=0.2)
    assert num_drafts > num_accepted > 0.4 * num_drafts
