"""Sources of drafts for simulated engines: own ones of sequences, and second models of each kind.

A second model is a token-storing runner, too. One that computes as the target does is accepted each
time, unless its pages, its progress or its keys are wrong.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import LAST_SAMPLED, ModelInputs
from cadenza.config import EngineLimits
from cadenza.drafting.drafts import Drafting, DraftSource, PromptLookup
from cadenza.engine.model_drafter import DraftModel
from cadenza.scheduler.scheduler import Scheduler
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS
from tests.engine.hashed_constraint import HashedConstraint
from tests.engine.simulation import VOCAB_SIZE, Parts
from tests.engine.solo import solo_stream

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=100,
    page_size=16,
    num_pages=28,
    max_num_queued_reqs=8,
)

Source = Literal["second model", "second model on the target's pages", "mtp layer"]
SPOILT = [-1]


def fake_of(
    limits: EngineLimits = LIMITS, kind: Callable[..., FakeRunner] = FakeRunner, **fields: Any
) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        **fields,
    )


@dataclass(eq=False)
class Foresight:
    """Knows the stream; each of its drafts is wrong with the chance `error`. May propose too many,
    beyond the stream's end, or ids that are no tokens of the stream at all.
    """

    sequence: Sequence
    rng: random.Random
    error: float

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        request = self.sequence.request
        solo = solo_stream(request, self.sequence.seed, self.sequence.max_num_tokens)
        rest = solo.token_ids[len(token_ids) - len(request.prompt_token_ids) :]
        drafts = [*rest, *self.rng.choices(range(VOCAB_SIZE), k=MAX_SPECULATIVE_TOKENS)][:most]
        return [self._spoilt(token_id) for token_id in drafts]

    def _spoilt(self, token_id: int) -> int:
        return self.rng.randrange(VOCAB_SIZE) if self.rng.random() < self.error else token_id


@dataclass(eq=False)
class Silent:
    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return []


class AlwaysDrafts(Drafting):
    """Never pauses, so that rare cases are met often."""

    def learn(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        pass


class SourcesScheduler(Scheduler):
    """Gives most sequences a source of their own, and checks the masks of constrained entries."""

    def add(self, sequence: Sequence) -> None:
        rng = random.Random(f"{sequence.request_id} {sequence.sample}")
        kind = rng.choice([Drafting, AlwaysDrafts, AlwaysDrafts, None])
        if kind is not None:
            most = rng.choice([1, 3, MAX_SPECULATIVE_TOKENS])
            sequence.drafting = kind(source=self.source_of(sequence, rng), most=most)
        super().add(sequence)

    def source_of(self, sequence: Sequence, rng: random.Random) -> DraftSource | None:
        if rng.random() < 0.1:
            return Silent()
        if rng.random() < 0.2:
            return PromptLookup(shortest=1, longest=3)
        return Foresight(sequence, rng, error=rng.choice([0.0, 0.1, 0.5, 1.0]))

    def schedule(self, now_s: float = 0.0) -> Batch | None:
        batch = super().schedule(now_s)
        for entry in batch.entries if batch else ():
            if entry.sequence.constraint is not None and entry.masks:
                check_masks(entry)
        return batch


OWN_SOURCES = Parts(scheduler=SourcesScheduler)


def check_masks(entry: BatchEntry) -> None:
    """Each draft is allowed, and each choice has the mask of the tokens before it."""
    sequence = entry.sequence
    assert isinstance(sequence.constraint, HashedConstraint)
    ahead = sequence.constraint.fork()
    generated = sequence.token_ids[sequence.num_prompt_tokens :]
    assert ahead.accepted == generated, "the constraint has accepted other tokens"
    assert len(entry.masks) == 1 + len(entry.drafts)
    for draft, mask in zip((*entry.drafts, None), entry.masks, strict=True):
        assert ahead.is_complete or mask == ahead.allowed(), "the mask of other tokens"
        if draft is not None:
            assert not ahead.is_complete, "a draft behind the end"
            assert mask[draft // 8] >> draft % 8 & 1, "a draft that is not allowed"
            ahead.accept(draft)


@dataclass(eq=False)
class Erring:
    """Draws other tokens than the runner it stands for, one in a few, and as its last ones, too."""

    runner: FakeRunner
    error: float
    rng: random.Random

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = self.runner.launch(inputs)
        output = handle.output
        is_wrong = [self.rng.random() < self.error for _ in output.token_ids]
        drawn = np.where(is_wrong, (output.token_ids + 1) % VOCAB_SIZE, output.token_ids)
        drawn = drawn.astype(np.int32)
        rows = inputs.logits.rows[: len(drawn)]
        self.runner._last_sampled[rows] = drawn
        return FakeStepHandle(replace(output, token_ids=drawn), handle.on_read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


@dataclass(eq=False)
class OnTargetsPages:
    """A copy of the model, which has no KV of its own to reset."""

    runner: FakeRunner

    def reset(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


@dataclass(slots=True, eq=False)
class Stored:
    """What an MTP layer stores of a token: the history, and whether the target knew it."""

    history: list[int]
    is_known: bool


@dataclass(slots=True, eq=False, kw_only=True)
class FakeMTPLayer(FakeRunner):
    """What it stores of a token is the history that its hidden state stands for: of a known token
    the target's tokens before it, read at launch; of a token that it drew itself, its own. Its
    result is right only if every token before was stored, those that the target knows from the
    target's own, so that an accepted draft that is not computed again is seen.
    """

    target: FakeRunner
    entries: dict[int, Stored] = field(default_factory=dict[int, Stored])

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
            self.entries[slot] = Stored([*before, token], is_known)

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
                return [*history, *SPOILT]  # behind a token that the layer drew and kept
            num_known += entry.is_known
        return list(history)  # the caller adds to it


def draft_model_of(
    source: Source, target: FakeRunner, limits: EngineLimits, *, error: float = 0.0
) -> DraftModel:
    """A second model over the runner of the target; `error` is the share of its wrong tokens."""
    shares_kv = source == "second model on the target's pages"
    runner: Any = OnTargetsPages(target) if shares_kv else fake_of(limits)
    if source == "mtp layer":
        runner = fake_of(limits, FakeMTPLayer, target=target)
    if error:
        runner = Erring(runner, error, random.Random(f"errors {limits.num_pages}"))
    return DraftModel(
        runner=runner, limits=limits, shares_kv=shares_kv, reads_hidden=source == "mtp layer"
    )
