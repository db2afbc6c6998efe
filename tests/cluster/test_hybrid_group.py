"""Streams of a model with recurrent states outlive the replicas that compute them, bit for bit.

On real engines of a tiny hybrid in processes of their own. A stream that moves is computed again
from its tokens, or from a snapshot that the other replica has; its state is never sent.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.cluster.engine_group import EngineGroup
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.process.launch import COMMAND
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions, pinned
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.events import Event, Token
from cadenza.loading.build import build_core, open_planned
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.cluster.conftest import SECRET, Group
from tests.cluster.test_engine_group import kill
from tests.engine.process.conftest import TIMEOUT_S
from tests.engine.process.test_recovery import content_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

SHAPES = by_day(["tiny-qwen3.5", "tiny-lfm2", "tiny-granite4"], {"tiny-qwen3.5"})
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=48, max_model_len=320, num_pages=60, max_itl_ms="none"
)
PATIENT = WatchdogTimeouts(hung_after_s=TIMEOUT_S, backoff_s=0.0)
NUM_REQUESTS = 16


def requests() -> list[Request]:
    """Half of them behind one prefix of several pages; some draft, and some have two samples."""
    rng, vocab_size = random.Random("hybrids"), named_shape("tiny-qwen3.5").vocab_size
    prefix = rng.choices(range(3, vocab_size), k=50)
    return [
        Request(
            prompt_token_ids=(
                *prefix[: 50 * (index % 2)],
                *rng.choices(range(3, vocab_size), k=rng.choice([2, 30, 100])),
            ),
            params=SamplingParams(
                max_tokens=rng.choice([60, 120]),
                temperature=rng.choice([0.0, 0.8]),
                seed=index,
                logprobs=2,
                n=1 + (index % 5 == 4),
                ignore_eos=True,
                speculative=index % 3 == 0,
            ),
        )
        for index in range(NUM_REQUESTS)
    ]


def open_group(model: str, config: EngineConfig) -> Group:
    """Two replicas, each of which begins with the sizes of the first."""
    links: list[ProcessLink] = []
    options = ProcessOptions(command=COMMAND, watchdog=PATIENT, prefix_secret=SECRET)

    def make_replica(_: int, limits: EngineLimits | None, ids: Iterator[int]) -> EngineFront:
        own = config if limits is None else pinned(config, limits)
        links.append(ProcessLink(model, own, options))
        return EngineFront(links[-1], ids, config.seed)

    return Group(EngineGroup(make_replica, 2, SECRET), links)


def undisturbed(model: str) -> list[Event]:
    """What an engine in this process gives that nothing happens to."""
    core, events = build_core(open_planned(model, CONFIG)), list[Event]()
    front = EngineFront(InProcessLink(core))
    for each in requests():
        front.submit(each)
    front.drain(TIMEOUT_S)
    front.serve(events.extend)
    return events


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_of_a_hybrid_outlive_each_replica_in_turn(tmp_path: Path, shape: str) -> None:
    folder = tmp_path / "model"
    write_random_checkpoint(named_shape(shape), folder, seed=2, dtype="float32")
    expected = undisturbed(str(folder))
    num_tokens = sum(isinstance(each, Token) for each in expected)
    group = open_group(str(folder), CONFIG)
    try:
        group.wait_replicas("ready", "ready")
        for each in requests():
            group.engine.submit(each)
        for turn, share in enumerate((0.2, 0.6)):
            group.wait(partial(has_events, group, int(share * num_tokens)))
            kill(group, turn)
        group.wait_all()
        assert content_of(group.events) == content_of(expected)
        assert group.engine.request_stats().num_resumed > 1
        group.wait(lambda: group.engine.status().num_restarts == 2)
    finally:
        group.stop()


def has_events(group: Group, count: int) -> bool:
    return len(group.events) >= count
