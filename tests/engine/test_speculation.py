"""Drafts change how many tokens a step gives, never which: any source, in random traffic.

The traffic, the drive and the oracle are those of `tests.engine.simulation`.
"""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.config import EngineLimits
from cadenza.core.batch import Batch
from cadenza.core.drafts import Drafting, DraftSource, drafting_of
from cadenza.core.draw_keys import draw_keys
from cadenza.core.packing import Packer
from cadenza.core.prompt_lookup import PromptLookup
from cadenza.core.scheduler import Scheduler
from cadenza.core.sequence import Sequence
from cadenza.core.step_cost import StepCost
from cadenza.core.step_schema import ModelInputs, StepOutput
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import InvalidRequestError
from cadenza.events import Event
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from tests.engine.simulation import (
    VOCAB_SIZE,
    Parts,
    Scenario,
    Simulation,
    replayable,
    run_requests,
    solo_stream,
)

NUM_SEEDS = 24
NUM_STEPS = 60
HERE = "tests/engine/test_speculation.py"


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


class DraftingScheduler(Scheduler):
    """Gives each sequence a source of its own."""

    def add(self, sequence: Sequence) -> None:
        rng = random.Random(f"{sequence.request_id} {sequence.sample}")
        kind = rng.choice([Drafting, AlwaysDrafts, AlwaysDrafts, None])
        if kind is not None:
            most = rng.choice([1, 3, MAX_SPECULATIVE_TOKENS])
            sequence.drafting = kind(source=self._source(sequence, rng), most=most)
        super().add(sequence)

    def _source(self, sequence: Sequence, rng: random.Random) -> DraftSource:
        if rng.random() < 0.1:
            return Silent()
        if rng.random() < 0.2:
            return PromptLookup(shortest=1, longest=3)
        return Foresight(sequence, rng, error=rng.choice([0.0, 0.1, 0.5, 1.0]))


DRAFTING = Parts(scheduler=DraftingScheduler)


def audit_published_pages(engine: EngineCore) -> None:
    """No published page of a running sequence holds a token that the sequence does not."""
    engine.check_invariants()
    size = engine.limits.page_size
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    for sequence in engine.scheduler.running:
        for index in range(sequence.num_published_pages):
            start = sequence.page_table[index] * size
            expected = sequence.token_ids[index * size : (index + 1) * size]
            assert runner.stored(start, size) == expected, "a page was published with other tokens"


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_streams_are_exact_and_books_balance_with_drafts(seed: int) -> None:
    name = "test_streams_are_exact_and_books_balance_with_drafts"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}]'"):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS)
        for loop in ("plain", "overlap"):
            audit = audit_published_pages
            Simulation(scenario, loop=loop, parts=DRAFTING, audit=audit).run().verify()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SEEDS, 600))
def test_long_streams_are_exact_with_drafts(seed: int) -> None:
    scenario = Scenario(seed=seed, num_steps=500)
    Simulation(scenario, loop="overlap", parts=DRAFTING).run().verify()


def test_the_traffic_holds_what_it_claims_to_test() -> None:
    modes: Counter[str] = Counter()

    class Observed(DraftingScheduler):
        def update(self, batch: Batch, output: StepOutput) -> list[Event]:
            drafted = [entry.drafts for entry in batch.entries]
            modes["mixed"] += any(drafted) and not all(drafted)
            modes["behind a prompt"] += any(e.drafts and e.start == 0 for e in batch.entries)
            events = super().update(batch, output)
            modes["ended within"] += any(e.drafts and e.sequence.is_finished for e in batch.entries)
            return events

    for seed in range(12):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS)
        record = Simulation(scenario, loop="overlap", parts=Parts(scheduler=Observed)).run()
        scheduler = record.engine.scheduler
        counts = scheduler.draft_counts
        modes["accepted"] += counts.num_accepted_tokens
        modes["rejected"] += counts.num_draft_tokens - counts.num_accepted_tokens
        modes["preempted"] += scheduler.num_preemptions
        assert sum(counts.num_accepted_per_pos) == counts.num_accepted_tokens
    missing = [mode for mode, count in modes.items() if not count]
    assert not missing, modes


class KeysOfTheRow(Packer):
    """Draws all tokens of a row with the key of its last position."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        first = batch.num_prompt_rows
        for entry in batch.entries:
            stop = first + entry.num_choices
            seeds = np.full(entry.num_choices, entry.sequence.seed, np.uint64)
            positions = np.full(entry.num_choices, entry.end, np.int32)
            inputs.logits.keys[first:stop] = draw_keys(seeds, positions)
            first = stop
        return inputs


class PublishesDrafts(DraftingScheduler):
    """Publishes the pages that a step has written, whatever was accepted."""

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        for entry in batch.entries:
            sequence = entry.sequence
            if entry.drafts and not sequence.is_finished:
                known, size = sequence.token_ids.copy(), self.limits.page_size
                sequence.token_ids += entry.drafts
                self.kv_cache.publish(sequence, entry.end)
                del sequence.token_ids[len(known) :], sequence.page_keys[len(known) // size :]
        return super().update(batch, output)


class AcceptsOneTooMany(DraftingScheduler):
    """Takes whatever was sampled behind a rejected draft."""

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        index = batch.num_prompt_rows
        for entry in batch.entries:
            sampled = output.token_ids[index : index + len(entry.drafts)]
            entry.drafts = tuple(sampled.tolist())
            index += entry.num_choices
        return super().update(batch, output)


@pytest.mark.parametrize(
    "parts",
    [
        Parts(scheduler=DraftingScheduler, packer=KeysOfTheRow),
        Parts(scheduler=PublishesDrafts),
        Parts(scheduler=AcceptsOneTooMany),
    ],
    ids=lambda parts: f"{parts.scheduler.__name__} {parts.packer.__name__}",
)
def test_the_streams_betray_a_mutant(parts: Parts) -> None:
    with pytest.raises(AssertionError, match=r"token|stream"):
        run_seeds(parts)


def run_seeds(parts: Parts) -> None:
    for seed in range(40):
        scenario, audit = Scenario(seed=seed, num_steps=NUM_STEPS), audit_published_pages
        Simulation(scenario, loop="overlap", parts=parts, audit=audit).run().verify()


SERVED = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("speculative", "prediction", "config", "most"),
    [
        (None, (), None, None),
        (None, (), SERVED, 4),
        (True, (), None, 5),
        (True, (), SERVED, 4),
        (False, (), SERVED, None),
        (False, (1, 2), SERVED, None),
        (2, (), None, 2),
        (2, (), SERVED, 2),
        (9, (), SERVED, 4),
        (9, (), None, 9),
        (None, (1, 2), None, MAX_SPECULATIVE_TOKENS),
        (None, (1, 2), SERVED, 4),
        (3, (1, 2), None, 3),
    ],
)
def test_a_request_chooses_its_drafts(
    speculative: bool | int | None,
    prediction: tuple[int, ...],
    config: SpeculativeConfig | None,
    most: int | None,
) -> None:
    params = SamplingParams(speculative=speculative)
    request = Request(prompt_token_ids=(1,), params=params, prediction=prediction)
    drafting = drafting_of(request, config)
    assert (None if drafting is None else drafting.most) == most


def test_a_number_of_drafts_may_be_given_by_its_name() -> None:
    named = SamplingParams(speculative={"num_speculative_tokens": 3})
    assert named == SamplingParams(speculative=3)
    for wrong in (0, 17, 1.5, "on", {"num_drafts": 3}, {"num_speculative_tokens": True}):
        with pytest.raises(InvalidRequestError, match="num_speculative_tokens"):
            SamplingParams(speculative=wrong)  # type: ignore[arg-type]


LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=100,
    page_size=16,
    num_pages=28,
    max_num_queued_reqs=8,
)


def fake_engine(
    runner: type[FakeRunner] = FakeRunner, options: CoreOptions | None = None
) -> EngineCore:
    runner_of_limits = runner(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
        vocab_size=VOCAB_SIZE,
    )
    return EngineCore(runner_of_limits, LIMITS, options)


def predicted(seed: int, *, error: int = 0, speculative: bool | None = None) -> Request:
    """A request and its own stream as its prediction, with every `error`-th token wrong."""
    prompt = tuple(range(seed, seed + 9))
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True, speculative=speculative
    )
    request = Request(prompt_token_ids=prompt, params=params)
    stream = solo_stream(request, seed, len(prompt) + 60).token_ids
    wrong = [
        (token_id + 1) % VOCAB_SIZE if error and place % error == 0 else token_id
        for place, token_id in enumerate(stream, 1)
    ]
    return Request(prompt_token_ids=prompt, params=params, prediction=tuple(wrong))


def test_rows_with_and_without_predictions_share_steps_and_count_their_own_drafts() -> None:
    engine = fake_engine()
    requests = [predicted(1), predicted(2, error=5), predicted(3, error=1)]
    requests.append(predicted(4, speculative=False))
    record = run_requests(engine, requests)
    record.verify()
    accepted, rejected = [0] * 4, [0] * 4
    for (request_id, _), tokens in record.streams.items():
        accepted[request_id] = sum(token.is_draft for token in tokens)
        rejected[request_id] = sum(token.num_rejected_drafts for token in tokens)
    counts = engine.scheduler.draft_counts
    assert sum(accepted) == counts.num_accepted_tokens
    assert sum(rejected) == counts.num_draft_tokens - counts.num_accepted_tokens
    assert accepted[0] > 50
    assert 0 < accepted[1] < accepted[0]
    assert accepted[2] == 0
    assert accepted[3] == rejected[3] == 0
    assert record.num_steps < 75, "a prediction saves no step"


def test_a_backend_that_verifies_no_drafts_refuses_what_asks_for_them() -> None:
    class Plain(FakeRunner):
        capabilities = frozenset({"logprobs"})  # type: ignore[assignment]

    engine = fake_engine(Plain)
    for name, request in (
        ("speculative", predicted(1, speculative=True)),
        ("prediction", predicted(1)),
    ):
        with pytest.raises(InvalidRequestError, match=rf"{name} is not supported") as refused:
            engine.submit(request)
        assert refused.value.param == name
    run_requests(engine, [Request(prompt_token_ids=(1,), params=SamplingParams(speculative=False))])


@pytest.mark.parametrize("prediction", [(VOCAB_SIZE,), (-1,), (1,) * 101])
def test_a_prediction_that_cannot_be_right_is_refused(prediction: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="prediction") as refused:
        fake_engine().submit(Request(prompt_token_ids=(1,), prediction=prediction))
    assert refused.value.param == "prediction"


@pytest.mark.parametrize(("ms_of_token", "is_dear"), [(0.5, False), (12.0, True)])
def test_drafts_that_prove_dearer_than_foreseen_are_made_less(
    ms_of_token: float, *, is_dear: bool
) -> None:
    now_s = 0.0

    class Timed(FakeRunner):
        def launch(self, inputs: ModelInputs) -> FakeStepHandle:
            step_s = (10.0 + ms_of_token * (inputs.num_tokens - 1)) / 1000

            def read() -> None:
                nonlocal now_s
                now_s += step_s

            return FakeStepHandle(super().launch(inputs).output, read)

    options = CoreOptions(
        clock=lambda: now_s,
        step_cost=StepCost(fixed_ms=7.0, token_ms=2.0, logit_ms=1.0, key_ms=1e-9),
    )
    engine = fake_engine(Timed, options)
    for start in range(1, 5):
        run_requests(engine, [predicted(start)])
    num_drafts = engine.scheduler.draft_counts.num_draft_tokens
    assert (num_drafts < 100) if is_dear else (num_drafts > 180), num_drafts
