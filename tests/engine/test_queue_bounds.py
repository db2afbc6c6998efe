"""The default bounds of the queue, and what a plan has for it."""

from dataclasses import replace
from typing import Any

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.loading.footprint import QUEUED_REQUEST_BYTES, QUEUED_TOKEN_BYTES
from cadenza.loading.plan import make_plan
from tests.engine.test_plan import GIB, TRAITS, plan


def test_the_queue_holds_what_a_share_of_the_memory_does_and_at_least_1024_requests():
    def queue(available_bytes: int, **options: Any) -> tuple[int, int, int]:
        found = plan(available_bytes, **options)
        assert found.planned_bytes <= available_bytes
        limits = found.limits
        return limits.max_num_queued_reqs, limits.max_num_queued_tokens, found.queue_bytes

    requests, tokens, num_bytes = queue(64 * GIB)
    assert requests == 64 * GIB // 512 // QUEUED_REQUEST_BYTES == 2796
    assert tokens == 3 * 64 * GIB // 512 // QUEUED_TOKEN_BYTES == 6_291_456
    assert GIB // 2 * 0.999 < num_bytes <= GIB // 2
    assert queue(4 * GIB)[:2] == (1024, 393_216)
    assert queue(GIB // 4, max_num_seqs=1)[:2] == (1024, 262_144)
    asked = {"max_num_queued_reqs": 5, "max_num_queued_tokens": 500}
    assert queue(4 * GIB, **asked) == (5, 500, 5 * QUEUED_REQUEST_BYTES + 500 * QUEUED_TOKEN_BYTES)
    # A pool that was sized by hand leaves less, which is then all that is planned.
    least = plan(4 * GIB, num_pages=1000)
    tight = plan(least.planned_bytes - least.queue_bytes + 1000, num_pages=1000)
    assert (tight.limits.max_num_queued_reqs, tight.queue_bytes) == (1024, 1000)
    own = replace(TRAITS, device_memory_bytes=GIB)
    assert make_plan(EngineConfig(), open_checkpoint(None), own, GIB).queue_bytes == 0
