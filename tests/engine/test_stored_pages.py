"""Prefixes that come from a folder: the same streams, and every fault is a miss."""

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.page_folder import FolderAccess, PageFolder, StoredMiss
from cadenza.engine.page_traffic import REFRESH_EVERY_S, PageTraffic
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.engine.stored_pages import MAX_READ_WAIT_S, MAX_STALLS, StoredPages
from cadenza.errors import RunnerError
from cadenza.kv.page_keys import KEY_BYTES
from cadenza.request import Request
from tests.engine.stored import (
    FINGERPRINT,
    LIMITS,
    MAX_BYTES,
    PROMPT,
    Streams,
    engine_of,
    files_of,
    folder_of,
    ran_once,
    request_of,
    run,
    runner_of,
)
from tests.scheduler.builders import manager_of, prompt_of, sequence_of

FULL = 96
"""Tokens of the prompt's full pages."""


def cold(requests: Sequence[Request]) -> Streams:
    return run(engine_of(None), requests)


def test_a_restarted_engine_takes_the_prompt_from_the_disk(tmp_path: Path) -> None:
    requests = [request_of()]
    first = ran_once(tmp_path, requests)
    engine = engine_of(folder_of(tmp_path))
    again = run(engine, requests)
    assert again.tokens == first.tokens == cold(requests).tokens
    assert (first.cached, again.cached) == ({(0, 0): 0}, {(0, 0): FULL})
    stored = engine.stored_pages
    assert stored is not None
    assert (stored.counts.num_read, stored.counts.num_written) == (6, 0)
    assert stored.counts.num_read_bytes > 6 * 16 * 8
    engine.close()


def test_generated_tokens_are_not_stored(tmp_path: Path) -> None:
    request = request_of()
    long = replace(request, params=replace(request.params, max_tokens=60))
    ran_once(tmp_path, [long])
    assert len(files_of(tmp_path)) == 6


def test_a_conversation_goes_on_from_the_disk(tmp_path: Path) -> None:
    """The second turn's prompt has the first one's answer, which is then stored too."""
    turn = (*PROMPT, *prompt_of(60, seed=8))
    ran_once(tmp_path, [request_of()])
    second = ran_once(tmp_path, [request_of(turn)])
    third = ran_once(tmp_path, [request_of(turn)])
    assert (second.cached[0, 0], third.cached[0, 0]) == (96, 144)
    assert second.tokens == third.tokens == cold([request_of(turn)]).tokens


def test_many_requests_read_a_shared_prefix_once(tmp_path: Path) -> None:
    requests = [request_of((*PROMPT[:96], *prompt_of(20, seed=index))) for index in range(6)]
    ran_once(tmp_path, [request_of()])
    engine = engine_of(folder_of(tmp_path))
    again = run(engine, requests)
    assert again.tokens == cold(requests).tokens
    assert set(again.cached.values()) == {FULL}
    assert engine.stored_pages is not None
    assert engine.stored_pages.counts.num_read == 6
    engine.close()


def test_samples_of_one_request_share_what_comes_from_the_disk(tmp_path: Path) -> None:
    requests = [request_of(n=3)]
    ran_once(tmp_path, requests)
    assert ran_once(tmp_path, requests).tokens == cold(requests).tokens


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_streams_are_the_same_in_every_mode(tmp_path: Path, loop: str, batching: str) -> None:
    requests = [
        request_of((*PROMPT[: 16 * index], *prompt_of(30, seed=index % 3))) for index in range(7)
    ]
    ran_once(tmp_path, requests[3:])
    options = CoreOptions(loop=loop, batching=batching)  # type: ignore[arg-type]
    engine = engine_of(folder_of(tmp_path), options=options)
    found = run(engine, requests)
    assert found.tokens == cold(requests).tokens
    assert sum(found.cached.values()) > 0
    engine.close()


def test_a_small_pool_takes_what_fits(tmp_path: Path) -> None:
    requests = [request_of((*PROMPT[:80], *prompt_of(20, seed=index))) for index in range(5)]
    ran_once(tmp_path, requests)
    small = replace(LIMITS, num_pages=9, max_model_len=140)
    engine = engine_of(folder_of(tmp_path), small)
    assert run(engine, requests).tokens == cold(requests).tokens
    engine.close()


def test_another_tenant_takes_nothing(tmp_path: Path) -> None:
    ran_once(tmp_path, [request_of(salt="one")])
    assert ran_once(tmp_path, [request_of(salt="another")]).cached == {(0, 0): 0}
    assert ran_once(tmp_path, [request_of(salt="one")]).cached == {(0, 0): FULL}


def test_another_fingerprint_takes_nothing(tmp_path: Path) -> None:
    ran_once(tmp_path, [request_of()])
    assert ran_once(tmp_path, [request_of()], "another ISA").cached == {(0, 0): 0}


def test_another_secret_takes_nothing(tmp_path: Path) -> None:
    ran_once(tmp_path, [request_of()])
    (tmp_path / "secret").unlink()
    assert ran_once(tmp_path, [request_of()]).cached == {(0, 0): 0}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("index", [0, 3])
def test_a_damaged_page_is_computed_and_stored_anew(
    tmp_path: Path, damage: str, index: int
) -> None:
    requests = [request_of()]
    ran_once(tmp_path, requests)
    engine = engine_of(folder_of(tmp_path))
    key = engine.scheduler.kv_cache.page_keys(sequence_of(0, PROMPT))[index]
    (path,) = tmp_path.glob(f"*/??/{key.hex()}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-5] if damage == "cut" else data[:100] + b"\xff" + data[101:])
    found = run(engine, requests)
    assert found.tokens == cold(requests).tokens
    assert found.cached == {(0, 0): 16 * index}
    engine.close()
    assert engine.stored_pages is not None
    reason = "absent" if damage == "gone" else "damaged"
    assert engine.stored_pages.counts.misses[reason] == 1
    assert path.read_bytes() == data
    assert ran_once(tmp_path, requests).cached == {(0, 0): FULL}


def test_a_full_disk_switches_storing_off_and_streams_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    engine = engine_of(PageFolder(tmp_path, FINGERPRINT, MAX_BYTES, FolderAccess(write_file=full)))
    requests = [request_of(), request_of(prompt_of(50, seed=2))]
    assert run(engine, requests).tokens == cold(requests).tokens
    engine.close()
    assert files_of(tmp_path) == []
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1


@pytest.mark.parametrize("failing", ["read_pages", "write_pages"])
def test_a_device_that_copies_no_pages_switches_storing_off_and_streams_go_on(
    tmp_path: Path, failing: str
) -> None:
    class Failing(FakeRunner):
        def read_pages(self, page_ids: Sequence[int]) -> list[bytes]:
            if failing == "read_pages":
                raise RunnerError("no copies today")
            return super().read_pages(page_ids)

        def write_pages(self, page_ids: Sequence[int], contents: Sequence[bytes]) -> None:
            if failing == "write_pages":
                raise RunnerError("no copies today")
            super().write_pages(page_ids, contents)

    ran_once(tmp_path, [request_of()])
    requests = [request_of(), request_of(prompt_of(50, seed=2))]
    runner = runner_of(LIMITS, Failing)
    engine = EngineCore(runner, LIMITS, CoreOptions(page_folder=folder_of(tmp_path)))
    found = run(engine, requests)
    assert found.tokens == cold(requests).tokens
    if failing == "write_pages":
        assert found.cached[0, 0] == 0
    assert engine.stored_pages is not None
    assert not engine.stored_pages.is_busy
    run(engine, [request_of(prompt_of(90, seed=3))])
    num_files = len(files_of(tmp_path))
    engine.close()
    assert num_files < 6 + 3 + 5, "something was written after the failure"


def test_pages_with_other_tokens_are_not_taken(tmp_path: Path) -> None:
    """If two prefixes had one key, which needs the secret, tokens would tell them apart."""
    pages = folder_of(tmp_path)
    runner, manager = runner_of(LIMITS), manager_of(16)
    stored = StoredPages(runner, manager, pages)
    sequence = sequence_of(0, 40)
    assert not manager.is_being_read(sequence, 0.0)
    for key in sequence.page_keys:
        pages.write(key, bytes(64 + 128))
    other = sequence_of(1, tuple(sequence.token_ids))
    assert manager.is_being_read(other, 0.0)
    while manager.is_being_read(other, 0.0):
        stored.wait()
        stored.advance()
    assert manager.find_prefix(other).num_tokens == 0
    manager.check_invariants([])
    stored.close()


def test_an_engine_that_waits_for_pages_has_requests_and_one_that_stores_them_has_not(
    tmp_path: Path,
) -> None:
    pages = Never(tmp_path)
    engine = engine_of(pages)
    engine.submit(request_of())
    engine.step()
    assert engine.has_requests
    pages.release.set()
    while engine.has_requests:
        engine.step()
    stored = engine.stored_pages
    assert stored is not None
    pages.is_answering = False
    stored.keep(bytes(32), 0)
    assert not engine.is_idle
    assert not engine.has_requests
    engine.close()


class Never(PageFolder):
    """A disk that does not answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FINGERPRINT, MAX_BYTES)
        self.release = threading.Event()
        self.is_answering = True

    def __contains__(self, key: object) -> bool:
        return self.is_answering

    def read(self, key: bytes) -> bytes | StoredMiss:
        self.release.wait()
        return "absent"


def test_a_sequence_waits_for_a_bounded_time(tmp_path: Path) -> None:
    pages = Never(tmp_path)
    manager = manager_of(16)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    sequence, follower = sequence_of(0, prompt_of(40)), sequence_of(1, prompt_of(40))
    for now_s in (0.0, MAX_READ_WAIT_S):
        assert manager.is_being_read(sequence, now_s)
        assert manager.is_being_read(follower, now_s)
    for now_s in (MAX_READ_WAIT_S + 0.1, MAX_READ_WAIT_S + 0.2):
        assert not manager.is_being_read(sequence, now_s)
        assert not manager.is_being_read(follower, now_s), "it has waited as long itself"
    assert stored.counts.misses["late"] == 1
    pages.release.set()
    stored.close()


def test_a_sequence_that_came_later_waits_for_its_own_time(tmp_path: Path) -> None:
    pages = Never(tmp_path)
    manager = manager_of(16)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    sequence, follower = sequence_of(0, prompt_of(40)), sequence_of(1, prompt_of(40))
    late_s = MAX_READ_WAIT_S + 0.1
    assert manager.is_being_read(sequence, 0.0)
    assert manager.is_being_read(follower, 0.5)
    assert not manager.is_being_read(sequence, late_s)
    assert manager.is_being_read(follower, late_s), "in a read of its own"
    assert not manager.is_being_read(follower, 0.5 + late_s)
    pages.release.set()
    stored.close()


def test_the_patience_is_well_below_that_of_the_supervisor() -> None:
    assert WatchdogTimeouts().hung_after_s / 2 > MAX_STALLS * MAX_READ_WAIT_S


def test_a_disk_that_does_not_answer_is_not_read_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Never(tmp_path)
    manager = manager_of(16)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    for index in range(MAX_STALLS):
        sequence = sequence_of(index, prompt_of(40, seed=index))
        assert manager.is_being_read(sequence, 0.0), "it is still read"
        assert not manager.is_being_read(sequence, MAX_READ_WAIT_S + 0.1)
    assert not manager.is_being_read(sequence_of(7, prompt_of(40, seed=7)), 9.0)
    assert [each.message for each in caplog.records] == [
        "nothing is read from the prefix cache on disk any more: 2 times in a row there was no "
        "page within 1 s"
    ]
    pages.release.set()
    stored.close()


class Broken(PageFolder):
    """Its code has an error."""

    def __init__(self, folder: Path, failing: str) -> None:
        super().__init__(folder, FINGERPRINT, MAX_BYTES)
        self.failing = failing

    def read(self, key: bytes) -> bytes | StoredMiss:
        if self.failing == "read":
            raise RuntimeError("an error of the code")
        return super().read(key)

    def write(self, key: bytes, content: bytes) -> bool:
        if self.failing == "write":
            raise RuntimeError("an error of the code")
        return super().write(key, content)


@pytest.mark.parametrize("failing", ["read", "write"])
def test_an_error_of_the_thread_switches_storing_off_and_streams_go_on(
    tmp_path: Path, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran_once(tmp_path, [request_of()])
    requests = [request_of(), request_of(prompt_of(50, seed=2))]
    engine = engine_of(Broken(tmp_path, failing))
    assert run(engine, requests).tokens == cold(requests).tokens
    stored = engine.stored_pages
    assert stored is not None
    if failing == "read":
        assert stored.counts.misses["late"] == 0, "nothing waits for a thread that has ended"
    engine.close()
    assert [each.message for each in caplog.records] == ["the prefix cache on disk is off"]
    manager = manager_of(16)
    manager.page_store = stored
    assert not manager.is_being_read(sequence_of(0, PROMPT), 0.0)
    stored.keep(bytes(32), 0)
    assert not stored.is_busy
    assert not list(tmp_path.glob("writing-*"))


def test_a_dropped_engine_is_freed_and_its_thread_ends(tmp_path: Path) -> None:
    class Runner(FakeRunner):
        """With weak references."""

    options = CoreOptions(page_folder=folder_of(tmp_path))
    engine = EngineCore(runner_of(LIMITS, Runner), LIMITS, options)
    run(engine, [request_of()])
    runner = weakref.ref(engine.runner)
    thread = [each for each in threading.enumerate() if each.name == "stored-pages"][-1]
    del engine
    gc.collect()
    assert runner() is None
    thread.join(20)
    assert not thread.is_alive()
    assert len(files_of(tmp_path)) == 6
    assert not list(tmp_path.glob("writing-*"))


def test_an_engine_stores_what_a_request_left_before_it_ends(tmp_path: Path) -> None:
    engine = engine_of(folder_of(tmp_path))
    engine.submit(request_of())
    while engine.scheduler.has_work:
        engine.step()
    engine.close()
    assert len(files_of(tmp_path)) == 6
    assert not list(tmp_path.glob("writing-*"))


def test_a_cancelled_request_leaves_its_read(tmp_path: Path) -> None:
    ran_once(tmp_path, [request_of()])
    engine = engine_of(folder_of(tmp_path))
    request_id = engine.submit(request_of())
    engine.step()
    assert engine.cancel(request_id)
    assert run(engine, []).tokens == {}
    engine.close()


@pytest.mark.parametrize("others", [[], [request_of(prompt_of(40, seed=4))]], ids=len)
def test_what_is_used_from_memory_counts_as_used_on_the_disk(
    tmp_path: Path, others: list[Request]
) -> None:
    """Even if nothing is written any more."""
    engine = engine_of(folder_of(tmp_path))
    run(engine, [request_of()])
    while len(files_of(tmp_path)) < 6:
        assert engine.stored_pages is not None
        engine.stored_pages.wait()
    used = files_of(tmp_path)
    for path in used:
        os.utime(path, ns=(0, 0))
    run(engine, [request_of(), *others])
    engine.close()
    assert all(path.stat().st_mtime_ns > 0 for path in used)


class Gated(PageFolder):
    """Its thread stands still in each write, of a file that looks old."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FINGERPRINT, MAX_BYTES, FolderAccess(write_file=self._write_file))
        self.is_written, self.may_go_on = threading.Event(), threading.Event()

    def _write_file(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        os.utime(path, ns=(0, 0))
        self.is_written.set()
        assert self.may_go_on.wait(20)


@pytest.mark.parametrize("is_copied_first", [False, True])
def test_a_use_of_a_page_that_is_being_written_is_not_lost(
    tmp_path: Path, is_copied_first: bool
) -> None:
    """It was of a page that was not known yet: it is in the backlog, or copied a second time."""
    pages = Gated(tmp_path)
    manager = manager_of(16)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    sequence = sequence_of(0, prompt_of(20))
    assert manager.try_adopt(sequence, manager.find_prefix(sequence))
    manager.publish(sequence, 20)
    (key,), page_id = sequence.page_keys[:1], sequence.page_table[0]
    stored.advance()
    assert pages.is_written.wait(20)
    stored.keep(key, page_id)
    if is_copied_first:
        stored.advance()
    pages.may_go_on.set()
    stored.close()
    (path,) = files_of(tmp_path)
    assert path.stat().st_mtime_ns > 0


def test_equal_prompts_side_by_side_are_stored(tmp_path: Path) -> None:
    """Of two that compute a page at the same time, one's is cached."""
    pages = folder_of(tmp_path)
    manager = manager_of(16)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    pair = [sequence_of(index, prompt_of(40)) for index in range(2)]
    prefixes = [manager.find_prefix(sequence) for sequence in pair]
    for sequence, prefix in zip(pair, prefixes, strict=True):
        assert manager.try_adopt(sequence, prefix)
    for sequence in pair:
        manager.publish(sequence, 40)
    assert pair[0].page_table != pair[1].page_table
    stored.close()
    assert len(files_of(tmp_path)) == 40 // 16


def test_an_ended_read_does_not_keep_the_engine_awake(tmp_path: Path) -> None:
    """It may go on waiting for a row, while another sequence's pages are read."""

    class Slow(Never):
        def __contains__(self, key: object) -> bool:
            return key != absent.page_keys[0]

    absent, pending = sequence_of(0, prompt_of(40)), sequence_of(1, prompt_of(40, seed=1))
    pages = Slow(tmp_path)
    manager = manager_of(16)
    manager.page_keys(absent)
    stored = StoredPages(runner_of(LIMITS), manager, pages)
    assert not manager.is_being_read(absent, 0.0)
    assert manager.is_being_read(pending, 0.0)
    assert stored.wait()
    pages.release.set()
    stored.close()


def test_an_engine_reads_what_another_one_stores_beside_it(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path) for _ in range(2)]
    first, second = (engine_of(each) for each in folders)
    request = request_of()
    stored = run(first, [request])
    first.close()  # writes what is left; the other one has looked before
    folders[1].refresh()
    found = run(second, [request])
    assert found.tokens == stored.tokens
    assert (stored.cached, found.cached) == ({(0, 0): 0}, {(0, 0): FULL})
    assert second.stored_pages is not None
    assert second.stored_pages.counts.num_read == FULL // 16
    second.close()


def test_what_others_store_is_looked_for_again_and_again(tmp_path: Path) -> None:
    mine, other = (folder_of(tmp_path) for _ in range(2))
    traffic = PageTraffic(mine)
    key = bytes(KEY_BYTES)
    other.write(key, b"content")
    end_s = time.monotonic() + 20 * REFRESH_EVERY_S
    while key not in mine:
        assert time.monotonic() < end_s
        traffic.wait(0.01)
    traffic.stop()
    traffic.join(10.0)
    other.close()


def test_two_engines_share_one_folder(tmp_path: Path) -> None:
    engines = [engine_of(folder_of(tmp_path)) for _ in range(2)]
    requests = [request_of(), request_of(prompt_of(70, seed=3))]
    for _ in range(2):
        for engine in engines:
            assert run(engine, requests).tokens.values()
    for engine in engines:
        engine.close()
    assert len(files_of(tmp_path)) == 6 + 4
    assert sorted(ran_once(tmp_path, requests).cached.values()) == [64, FULL]
