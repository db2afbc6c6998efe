"""Controls of the comparison with an undisturbed run: each fault in moving a stream turns it red.

On token-storing engines in processes of their own, one of which is killed.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cadenza.engine.front import EngineFront
from cadenza.engine.open_requests import OpenRequest
from cadenza.engine.request_check import CheckedRequest, request_of
from cadenza.events import Event, Token
from cadenza.request import Request, SamplingParams
from tests.cluster.conftest import MakeFront, OpenGroup
from tests.engine.process.test_recovery import CONFIG, undisturbed, workload

SLOW = {"step_s": 0.002}
Streams = dict[tuple[int, int], dict[int, int]]


def tokens_of(events: Sequence[Event]) -> Streams:
    """By request and sample, each token at its place."""
    found: Streams = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault((event.request_id, event.sample), {})[event.index] = event.token_id
    return found


def wanted_tokens() -> Streams:
    found: Streams = {}
    for key, content in undisturbed().items():
        tokens = [each[0] for each in content if isinstance(each, tuple)]
        if tokens:
            found[key] = dict(enumerate(tokens))
    return found


def moved(
    open_group: OpenGroup,
    scripts: Sequence[dict[str, Any]] = (SLOW, SLOW),
    make_front: MakeFront = EngineFront,
) -> Streams:
    """The workload over two replicas, of which the first is killed."""
    group = open_group(2, CONFIG, scripts, make_front=make_front)
    group.wait_replicas("ready", "ready")
    for each in workload():
        group.engine.submit(each)
    group.wait(lambda: len(group.events) >= 300)
    pid = group.links[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    group.wait_all()
    assert group.engine.request_stats().num_resumed > 0
    return tokens_of(group.events)


class LateFront(EngineFront):
    """Has streams that it adopts go on one token late."""

    def adopt(self, entry: OpenRequest) -> None:
        for ids in entry.token_ids.values():
            ids.extend(ids[-1:])
        super().adopt(entry)


class SaltlessFront(EngineFront):
    """Drops the salts of requests."""

    def submit(self, given: Request | CheckedRequest) -> int:
        return super().submit(replace(request_of(given), cache_salt=""))


def test_a_stream_that_goes_on_one_token_late_is_seen(open_group: OpenGroup) -> None:
    assert moved(open_group) == wanted_tokens()
    assert moved(open_group, make_front=LateFront) != wanted_tokens()


def test_seeds_that_are_left_to_engines_of_unlike_seeds_are_seen(open_group: OpenGroup) -> None:
    scripts = [SLOW, {**SLOW, "seed": 7}]
    assert moved(open_group, scripts) == wanted_tokens()
    implicit = moved(open_group, scripts, lambda link, ids, _: EngineFront(link, ids))
    assert implicit != wanted_tokens()


def test_two_arithmetics_are_seen_where_they_are_not_told_and_refused_where_they_are(
    open_group: OpenGroup, caplog: pytest.LogCaptureFixture
) -> None:
    other = {**SLOW, "arithmetic": 1}
    assert moved(open_group, [SLOW, other]) != wanted_tokens()
    told = [{**SLOW, "told_arithmetic": "avx2 1"}, {**other, "told_arithmetic": "avx512 1"}]
    group = open_group(2, CONFIG, told)
    group.wait(lambda: "replica 1 is not used" in caplog.text)
    assert "(arithmetic avx512 1, not avx2 1)" in caplog.text
    for each in workload():
        group.engine.submit(each)
    group.wait_all()
    assert tokens_of(group.events) == wanted_tokens()


@pytest.mark.parametrize(("make_front", "num_cached"), [(EngineFront, 0), (SaltlessFront, 32)])
def test_a_salt_that_is_dropped_is_seen_in_what_another_tenant_finds(
    open_group: OpenGroup, make_front: MakeFront, num_cached: int
) -> None:
    group = open_group(1, CONFIG, make_front=make_front)
    group.wait_replicas("ready")
    for salt in ("one", "other"):
        prompt = tuple(range(40))
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        own = Request(prompt_token_ids=prompt, params=params, cache_salt=salt)
        group.engine.submit(own)
        group.wait_all()
    found = [each.num_cached_tokens for each in group.events if isinstance(each, Token)]
    assert found[2] == num_cached
