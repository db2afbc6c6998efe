"""Drafts change how many tokens a step gives, never which: any source, in random traffic, with
constraints and without.

The traffic, the drive and the oracle are those of `tests.engine.simulation`, the sources those of
`tests.engine.drafting`.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cadenza.core.batch import Batch
from cadenza.core.draw_keys import draw_keys
from cadenza.core.packing import Packer
from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import NO_RULES, ModelInputs, StepOutput
from cadenza.events import Event
from cadenza.structured import ConstraintSpec
from tests.by_day import by_day
from tests.engine.drafting import (
    SOURCES,
    Source,
    SourcesScheduler,
    audit_published_pages,
    check_masks,
    parts_of,
)
from tests.engine.hashed_constraint import PHRASES, SHORT, STEADY, HashedConstraint
from tests.engine.scenario import Client, Scenario
from tests.engine.simulation import Parts, Record, Simulation, replayable

NUM_STEPS = 60
HERE = "tests/engine/test_speculation.py"


class Constrained(Scenario):
    """Most requests have a constraint."""

    def client(self, index: int) -> Client:
        client = super().client(index)
        grammar = random.Random(f"{self.seed} {index}").choice([None, "a", STEADY, PHRASES, SHORT])
        if grammar is None:
            return client
        spec = ConstraintSpec(grammar=grammar)
        return replace(client, request=replace(client.request, constraint=spec))


SCENARIOS = {"free": Scenario, "constrained": Constrained}


def num_rejected(record: Record) -> int:
    counts = record.engine.draft_counts
    assert sum(counts.num_accepted_per_pos) == counts.num_accepted_tokens
    return counts.num_draft_tokens - counts.num_accepted_tokens


@pytest.mark.parametrize("kind", SCENARIOS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", by_day(range(300), range(4)))
def test_streams_are_exact_and_invariants_hold_with_drafts(
    seed: int, source: Source, kind: str
) -> None:
    command = f"python -m pytest '{HERE}' -k '{seed}-{source}-{kind}'"
    error = (0.0, 0.1, 0.4, 1.0)[seed % 4]
    with replayable(f"seed {seed}", command):
        rates = {"hang_up": 0.15} if error else {"hang_up": 0.0}
        if seed % 4 == 1:
            rates |= {"loss": 0.04, "preemption": 0.1}
        scenario = SCENARIOS[kind](seed=seed, num_steps=NUM_STEPS, **rates)
        parts = parts_of(source, error=error, context=0.5 if seed % 4 == 2 else 1.0)
        for loop in ("plain", "overlap"):
            simulation = Simulation(scenario, loop=loop, parts=parts, audit=audit_published_pages)
            record = simulation.run()
            record.verify()
            if not error and source != "own sources":
                # A stop token ends a stream within its drafts; none behind it counts as accepted.
                ends = sum(end.finish_reason == "stop" for end in record.finished.values())
                assert num_rejected(record) <= ends, "a model that is right was rejected"


def observed(modes: Counter[str]) -> Parts:
    """Counts what steps held."""

    class Observed(SourcesScheduler):
        def update(self, batch: Batch, output: StepOutput) -> list[Event]:
            drafted = [entry.drafts for entry in batch.entries]
            modes["mixed"] += any(drafted) and not all(drafted)
            modes["behind a prompt"] += any(e.drafts and e.start == 0 for e in batch.entries)
            events = super().update(batch, output)
            modes["ended within"] += any(e.drafts and e.sequence.is_finished for e in batch.entries)
            return events

        def schedule(self, now_s: float = 0.0) -> Batch | None:
            batch = super().schedule(now_s)
            for entry in batch.entries if batch else ():
                if entry.sequence.constraint is not None and entry.masks:
                    check_masks(entry, modes)
                    modes["drafts" if entry.drafts else "none allowed"] += 1
            return batch

    return Parts(scheduler=Observed)


def test_the_traffic_has_every_case_that_it_claims_to_test() -> None:
    modes: Counter[str] = Counter()
    for seed in range(4):
        for kind in SCENARIOS.values():
            scenario = kind(seed=seed, num_steps=NUM_STEPS)
            record = Simulation(scenario, loop="overlap", parts=observed(modes)).run()
            modes["accepted"] += record.engine.draft_counts.num_accepted_tokens
            modes["rejected"] += num_rejected(record)
            modes["preempted"] += record.engine.scheduler.num_preemptions
    wanted = ("mixed", "behind a prompt", "ended within", "several masks", "complete", "drafts")
    wanted = (*wanted, "none allowed", "accepted", "rejected", "preempted")
    assert all(modes[mode] for mode in wanted), modes


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


class MasksOfTheRow(Packer):
    """All choices of a row have its first mask."""

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        named = inputs.logits.rule_record
        named[named != NO_RULES] = inputs.logits.rows[named != NO_RULES]
        return inputs


class PublishesDrafts(SourcesScheduler):
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


class AcceptsOneTooMany(SourcesScheduler):
    """Takes whatever was sampled behind a rejected draft."""

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        index = batch.num_prompt_rows
        for entry in batch.entries:
            sampled = output.token_ids[index : index + len(entry.drafts)]
            entry.drafts = tuple(sampled.tolist())
            index += entry.num_choices
        return super().update(batch, output)


class NeverForked(HashedConstraint):
    def fork(self) -> HashedConstraint:
        return self


class AcceptsDraftsAhead(SourcesScheduler):
    """Constraints accept their drafts."""

    def add(self, sequence: Sequence) -> None:
        if isinstance(sequence.constraint, HashedConstraint):
            sequence.constraint = NeverForked(sequence.constraint.grammar)
        super().add(sequence)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Scenario, Parts(scheduler=SourcesScheduler, packer=KeysOfTheRow)),
        (Scenario, Parts(scheduler=PublishesDrafts)),
        (Scenario, Parts(scheduler=AcceptsOneTooMany)),
        (Constrained, Parts(scheduler=SourcesScheduler, packer=MasksOfTheRow)),
        (Constrained, Parts(scheduler=AcceptsDraftsAhead)),
    ],
    ids=["KeysOfTheRow", "PublishesDrafts", "AcceptsOneTooMany", "MasksOfTheRow", "AcceptsAhead"],
)
def test_the_oracle_catches_the_fault(kind: type[Scenario], parts: Parts) -> None:
    def play() -> None:
        for seed in range(40):
            scenario = kind(seed=seed, num_steps=NUM_STEPS)
            audit = audit_published_pages
            Simulation(scenario, loop="overlap", parts=parts, audit=audit).run().verify()

    with pytest.raises(AssertionError):
        play()
