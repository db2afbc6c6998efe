"""Slots of recurrent states in tests: how many there are, and what nobody may read."""

import random

from cadenza.backends.fake import FakeRunner
from cadenza.engine.core import EngineCore


def state_limits(seed: int, max_num_seqs: int) -> dict[str, int]:
    """Random limits of the slots, at least two for each row."""
    rng = random.Random(f"states {seed}")
    spare = rng.choice([0, 0, 1, 3, max_num_seqs, 40])
    return {
        "num_state_slots": 2 * max_num_seqs + spare,
        "state_snapshot_interval": rng.choice([16, 32, 512]),
    }


def spoil_free_states(engine: EngineCore) -> None:
    """Overwrites the states in all slots that nobody may read any more; those that launched steps
    read or write are none of them."""
    states, runner = engine.scheduler.kv_cache.states, engine.runner
    if states is None:
        return
    assert isinstance(runner, FakeRunner)
    pool = states.pool
    for launched in engine._loop.in_flight:
        for entry in launched.batch.entries:
            named = [kept.slot for kept in entry.kept_states]
            named += [] if entry.state_start is None else [entry.state_start]
            assert not any(map(pool.is_reusable, named)), "a slot of a launched step is reused"
    slots = range(pool.num_pages)
    runner.states.spoil([s for s in slots if pool.is_reusable(s) and not pool.is_cached(s)])
