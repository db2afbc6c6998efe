"""The overlapped loop gives what the plain one gives, and really launches ahead of reading."""

import pytest

from cadenza.batch.step_schema import LAST_SAMPLED
from cadenza.config import SchedulerLoop
from cadenza.request import Request
from tests.xla.harness import BASE, Lab, Mode, random_requests, replay, serve, shout
from tests.xla.recording import RecordingRunner


def record(lab: Lab, requests: list[Request], loop: SchedulerLoop) -> RecordingRunner:
    runner = RecordingRunner(lab.runner())
    serve(runner, BASE, requests, Mode(loop=loop, arrival_seed=61))
    return runner


def launched_ahead(trace: list[tuple[str, int]]) -> list[int]:
    """Steps that were launched while the step before them was unread."""
    order = {event: index for index, event in enumerate(trace)}
    return [
        step
        for kind, step in trace
        if kind == "launch"
        and ("launch", step - 1) in order
        and order["launch", step] < order["read", step - 1]
    ]


@pytest.mark.parametrize("seed", range(62, 66))
def test_the_overlapped_loop_gives_the_plain_loops_streams(lab: Lab, seed: int):
    replay(f"seed {seed}, 12 requests")
    requests = [shout(r) for r in random_requests(seed, 12, BASE)]
    streams = [
        serve(lab.runner(), BASE, requests, Mode(loop=loop, arrival_seed=seed)).streams
        for loop in ("plain", "overlap")
    ]
    for index, (plain, overlapped) in enumerate(zip(*streams, strict=True)):
        assert plain.difference(overlapped) is None, f"request {index}"


def test_the_overlapped_loop_launches_a_step_before_the_last_one_is_read(lab: Lab):
    runner = record(lab, random_requests(66, 8, BASE), "overlap")
    num_steps = len(runner.inputs)
    assert len(launched_ahead(runner.trace)) > 0.8 * num_steps
    reads = [step for kind, step in runner.trace if kind == "read"]
    assert reads == sorted(reads), "steps were read out of order"


def test_a_step_launched_ahead_takes_its_tokens_from_the_device(lab: Lab):
    runner = record(lab, random_requests(66, 8, BASE), "overlap")
    ahead = set(launched_ahead(runner.trace))
    decodes = [i for i in runner.inputs if i.step_id in ahead and i.num_tokens == i.num_logits]
    assert decodes
    for inputs in decodes:
        assert LAST_SAMPLED in inputs.tokens.ids[: inputs.num_tokens]


def test_the_plain_loop_reads_every_step_before_the_next_launch(lab: Lab):
    """The trace can tell the loops apart."""
    runner = record(lab, random_requests(66, 8, BASE), "plain")
    assert launched_ahead(runner.trace) == []
