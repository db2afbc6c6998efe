"""Prefixes of a model with recurrent state from a folder: pages, and a snapshot behind them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.page_folder import PageFolder
from cadenza.errors import RunnerError
from tests.by_day import by_day
from tests.engine.recurrent import spoil_free_states
from tests.engine.stored import (
    FINGERPRINT,
    LIMITS,
    PROMPT,
    Streams,
    engine_of,
    files_of,
    folder_of,
    request_of,
    run,
    runner_of,
)
from tests.scheduler.builders import prompt_of

RECURRENT = replace(LIMITS, num_state_slots=20, state_snapshot_interval=48)
STATE_BYTES = 8 * (1 + 3 + 256)
"""Of a state of the fake runner: a count, a window, and as many tokens as a sequence has."""


def ran_once(folder: Path, *prompts: Sequence[int]) -> Streams:
    """In an engine that is then closed."""
    engine = engine_of(folder_of(folder), RECURRENT)
    found = run(engine, [request_of(prompt) for prompt in prompts or [PROMPT]])
    engine.close()
    return found


def cold(*prompts: Sequence[int]) -> Streams:
    return run(engine_of(None, RECURRENT), [request_of(prompt) for prompt in prompts or [PROMPT]])


def states_in(folder: Path) -> list[Path]:
    return [path for path in files_of(folder) if path.stat().st_size > STATE_BYTES]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("length", by_day(range(1, 101), {16, 17, 48, 49, 64, 96, 97, 100}))
def test_a_restarted_engine_starts_from_the_last_page_at_every_length(
    tmp_path: Path, length: int
) -> None:
    prompt = PROMPT[:length]
    first, again = ran_once(tmp_path, prompt), ran_once(tmp_path, prompt)
    assert first.tokens == again.tokens == cold(prompt).tokens
    assert again.cached == {(0, 0): (length - 1) // 16 * 16}


def test_states_are_stored_beside_pages(tmp_path: Path) -> None:
    ran_once(tmp_path)
    assert len(files_of(tmp_path)) == 6 + 2
    assert len(states_in(tmp_path)) == 2, "behind 48 and behind 96 tokens"


def test_a_prompt_that_parts_early_reads_up_to_the_best_snapshot(tmp_path: Path) -> None:
    ran_once(tmp_path)
    other = (*PROMPT[:80], *prompt_of(20, seed=8))
    engine = engine_of(folder_of(tmp_path), RECURRENT)
    found = run(engine, [request_of(other)])
    assert found.tokens == cold(other).tokens
    assert found.cached == {(0, 0): 48}
    stored = engine.stored_pages
    assert stored is not None
    assert stored.counts.num_read == 3, "no page is read that has no snapshot behind it"
    engine.close()


def test_a_damaged_state_is_a_shorter_prefix_and_is_stored_anew(tmp_path: Path) -> None:
    expected = ran_once(tmp_path)
    found: list[int] = []
    for path in states_in(tmp_path):
        kept = path.read_bytes()
        damage(path)
        again = ran_once(tmp_path)
        assert again.tokens == expected.tokens
        found += again.cached.values()
        is_anew = path.read_bytes() == kept
        assert is_anew == (found[-1] == 48), "the longest one was read, found out and replaced"
        path.write_bytes(kept)
    assert sorted(found) == [48, 96]
    for path in states_in(tmp_path):
        damage(path)
    last = ran_once(tmp_path)
    assert (last.tokens, last.cached) == (expected.tokens, {(0, 0): 0})


def test_the_longest_state_that_can_be_used_is_taken(tmp_path: Path) -> None:
    expected = ran_once(tmp_path)
    found = set[int]()
    for path in states_in(tmp_path):
        data = path.read_bytes()
        path.unlink()
        again = ran_once(tmp_path)
        assert again.tokens == expected.tokens
        found |= set(again.cached.values())
        path.write_bytes(data)
    assert found == {48, 96}


@pytest.mark.parametrize("index", range(6))
def test_a_missing_page_ends_the_prefix_at_a_snapshot_before_it(tmp_path: Path, index: int) -> None:
    expected = ran_once(tmp_path)
    pages = [path for path in files_of(tmp_path) if path not in states_in(tmp_path)]
    pages[index].unlink()
    again = ran_once(tmp_path)
    assert again.tokens == expected.tokens
    assert again.cached[0, 0] in (0, 48)


def test_a_snapshot_that_made_room_comes_back_behind_pages_that_stayed(tmp_path: Path) -> None:
    engine = engine_of(folder_of(tmp_path), replace(RECURRENT, num_state_slots=8))
    stored = engine.stored_pages
    assert stored is not None
    assert run(engine, [request_of()]).cached == {(0, 0): 0}
    while stored.counts.num_written < 6 + 2:
        stored.advance()
        stored.wait()
    for index in range(4):
        run(engine, [request_of(prompt_of(40, seed=index))])
    states = engine.scheduler.kv_cache.states
    assert states is not None
    while (slot := next(iter(states._page_of), None)) is not None:
        states.pool.uncache(slot)
    num_read = stored.counts.num_read
    again = run(engine, [request_of()])
    assert list(again.cached.values()) == [96]
    assert stored.counts.num_read == num_read
    engine.close()


def test_states_that_are_too_large_for_the_folder_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = PageFolder(tmp_path, FINGERPRINT, 32 * 2000)
    engine = engine_of(small, RECURRENT)
    with caplog.at_level(logging.WARNING):
        found = run(engine, [request_of(), request_of(prompt_of(60, seed=1))])
    engine.close()
    assert found.tokens == cold(PROMPT, prompt_of(60, seed=1)).tokens
    assert not states_in(tmp_path)
    assert files_of(tmp_path)
    assert [each.message.split(":")[0] for each in caplog.records] == [
        f"snapshots of {STATE_BYTES + 64} bytes are not stored"
    ]


@pytest.mark.parametrize("failing", ["read_states", "write_states"])
def test_an_error_of_a_copy_switches_storing_off_and_streams_go_on(
    tmp_path: Path, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(FakeRunner):
        def read_states(self, slots: Sequence[int]) -> list[bytes]:
            if failing == "read_states":
                raise RunnerError("the device is lost")
            return FakeRunner.read_states(self, slots)

        def write_states(self, slots: Sequence[int], contents: Sequence[bytes]) -> None:
            raise RunnerError("the device is lost")

    if failing == "write_states":
        ran_once(tmp_path)
    runner = runner_of(RECURRENT, Failing)
    engine = EngineCore(runner, RECURRENT, CoreOptions(page_folder=folder_of(tmp_path)))
    found = run(engine, [request_of()])
    engine.close()
    assert (found.tokens, found.cached) == (cold().tokens, {(0, 0): 0})
    assert "the prefix cache on disk is off" in caplog.text


def test_many_requests_share_what_comes_from_the_disk(tmp_path: Path) -> None:
    prompts = [(*PROMPT[:96], *prompt_of(20, seed=index)) for index in range(6)]
    ran_once(tmp_path)
    engine = engine_of(folder_of(tmp_path), RECURRENT)
    requests = [request_of(prompt) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
        engine.check_invariants()
        spoil_free_states(engine)
    assert engine.stored_pages is not None
    assert engine.stored_pages.counts.num_read == 6
    assert engine.scheduler.prefix_counts.num_hits == 6 * 96
    engine.close()
    assert ran_once(tmp_path, *prompts).tokens == cold(*prompts).tokens
