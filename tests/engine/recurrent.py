"""Slots of recurrent states that nobody may read, in tests."""

from cadenza.backends.fake import FakeRunner
from cadenza.engine.core import EngineCore


def spoil_free_states(engine: EngineCore) -> None:
    """Overwrites the states in all slots that nobody may read any more; those that launched steps
    read or write are none of them."""
    states, runner = engine.scheduler.kv_cache.states, engine.runner
    if states is None:
        return
    assert isinstance(runner, FakeRunner)
    pool = states.pool
    for launched in engine.loop.in_flight:
        for entry in launched.batch.entries:
            named = [kept.slot for kept in entry.kept_states]
            named += [] if entry.state_start is None else [entry.state_start]
            assert not any(map(pool.is_reusable, named)), "a slot of a launched step is reused"
    slots = range(pool.num_pages)
    runner.states.spoil([s for s in slots if pool.is_reusable(s) and not pool.is_cached(s)])
