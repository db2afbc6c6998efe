"""Random traffic over the token-storing runner: no invariant breaks, every stream is exact, and
where there is work a step computes something.

Owns the seeds and the sizes; the drive and the oracle are
in `tests.engine.simulation`.
"""

from collections import Counter

import pytest
from msgspec.structs import replace

from cadenza.batch.sequence import SequenceStatus
from cadenza.config import SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.events import Token
from tests.by_day import by_day
from tests.engine.scenario import Scenario
from tests.engine.simulation import ObservedRunner, Record, Simulation, replayable

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")

SEEDS_BY_DAY = {*range(39), 79}
NUM_STEPS = 84  # of each of three runs, not counting the way to rest
NUM_SOAK_SEEDS = 1000
NUM_SOAK_STEPS = 500  # of each of three runs: 1,500,000 in all
NUM_TROUBLED_SEEDS = 400
NUM_TROUBLED_STEPS = 170  # of each of three runs: 204,000 in all
HERE = "tests/engine/test_simulation.py"


def simulate(scenario: Scenario, loop: SchedulerLoop) -> Record:
    record = Simulation(scenario, loop=loop).run()
    assert record.num_steps >= scenario.num_steps
    record.verify()
    return record


def shown(stream: list[Token]) -> list[Token]:
    """What a stream says; how much of its prompt was cached is up to when it started."""
    return [replace(token, num_cached_tokens=None, cache_miss=None) for token in stream]


def check_seed(seed: int, num_steps: int) -> None:
    check(Scenario(seed=seed, num_steps=num_steps))


def troubled(seed: int, num_steps: int, **traffic: float) -> Scenario:
    """Steps are lost, sequences preempted, clients hang up."""
    rates = {"loss": 0.04, "preemption": 0.1, "hang_up": 0.1, "arrival": 0.5, **traffic}
    return Scenario(seed=seed, num_steps=num_steps, is_bounded=seed % 3 == 2, **rates)


def check(scenario: Scenario) -> None:
    plain, overlap = simulate(scenario, "plain"), simulate(scenario, "overlap")
    ended = plain.finished.keys() & overlap.finished.keys()
    for stream in ended - plain.failed - overlap.failed:
        assert plain.requests[stream[0]] == overlap.requests[stream[0]]
        ours, theirs = (shown(record.streams[stream]) for record in (plain, overlap))
        assert ours == theirs, "the loops differ"
    assert simulate(scenario, "overlap").log == overlap.log, "one seed gave two event logs"


@pytest.mark.parametrize("seed", by_day(range(200), SEEDS_BY_DAY))
def test_streams_are_exact_and_invariants_hold_under_random_traffic(seed: int) -> None:
    name = "test_streams_are_exact_and_invariants_hold_under_random_traffic"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}]'"):
        check_seed(seed, NUM_STEPS)


@pytest.mark.parametrize("seed", range(20))
def test_every_step_computes_where_steps_are_lost_and_sequences_preempted(seed: int) -> None:
    name = "test_every_step_computes_where_steps_are_lost_and_sequences_preempted"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}]'"):
        check(troubled(seed, NUM_STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_TROUBLED_SEEDS))
def test_200000_steps_of_which_some_are_lost_are_exact_and_end(seed: int) -> None:
    name = "test_200000_steps_of_which_some_are_lost_are_exact_and_end"
    with replayable(f"seed {seed}", f"python -m pytest -m soak '{HERE}::{name}[{seed}]'"):
        check(troubled(seed, NUM_TROUBLED_STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SOAK_SEEDS))
def test_a_million_steps_are_exact(seed: int) -> None:
    name = "test_a_million_steps_are_exact"
    with replayable(f"seed {seed}", f"python -m pytest -m soak '{HERE}::{name}[{seed}]'"):
        check_seed(seed, NUM_SOAK_STEPS)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", by_day(range(20), range(2)))
def test_submits_and_cancels_at_random_leak_no_page_and_end_once(
    seed: int, loop: SchedulerLoop
) -> None:
    name = "test_submits_and_cancels_at_random_leak_no_page_and_end_once"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}-{loop}]'"):
        scenario = Scenario(seed=seed, num_steps=500, arrival=0.9, hang_up=0.7, max_len=24)
        record = simulate(scenario, loop)
        num_accepted = len(record.streams)
        assert num_accepted == len(record.finished) + record.num_cancels
        assert num_accepted > 100


def test_the_traffic_has_every_case_that_it_claims_to_test() -> None:
    modes: Counter[str] = Counter()

    def watch(engine: EngineCore) -> None:
        engine.check_invariants()
        running = engine.scheduler.running
        modes["full batches"] += len(running) == engine.limits.max_num_seqs
        tables = Counter(sequence.request_id for sequence in running)
        modes["samples beside each other"] += any(count > 1 for count in tables.values())
        modes["tokens in flight"] += any(sequence.num_pending_tokens for sequence in running)
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in running)

    for seed in range(10):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS)
        record = Simulation(scenario, loop="overlap", audit=watch).run()
        runner = record.engine.runner
        assert isinstance(runner, ObservedRunner)
        modes["mixed steps"] += runner.num_mixed_steps
        modes["copied pages"] += runner.num_copied_pages
        modes["cut prompts"] += runner.num_cut_prompts
        modes["preemptions"] += record.engine.scheduler.num_preemptions
        modes["cache hits"] += sum(end.num_cached_tokens > 0 for end in record.finished.values())
        modes["cancels"] += record.num_cancels
        modes["refused"] += record.num_refused
        modes["queue full"] += record.num_queue_full
        modes["dense"] += scenario.limits.max_pages_per_seq == 1
        modes["pages of 16"] += scenario.limits.page_size == 16
        modes["pages of 64"] += scenario.limits.page_size == 64
        for end in record.finished.values():
            modes[f"ended by {end.finish_reason}"] += 1
    missing = [mode for mode, count in modes.items() if not count]
    assert not missing, f"{missing} never occurred: {modes}"
    assert {"ended by stop", "ended by length"} <= modes.keys()
