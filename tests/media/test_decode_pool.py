"""Processes that decode images: what ends one of them is an error of one image alone."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from cadenza.errors import EngineUnavailableError, QueueFullError
from cadenza.media.decode_pool import DecodePool
from cadenza.media.decode_worker import Bounds
from cadenza.media.image_input import ImageFault
from tests.media import corpus
from tests.media.corpus import quarters, saved
from tests.media.processors import Busy, Dying, Greedy, Stuck, WholeImages, Writing

GOOD = saved(quarters(), "PNG")
WHOLE = WholeImages()
ENDED = "its decoding failed, or was ended since it took over"


@pytest.fixture(scope="module")
def pool() -> Generator[DecodePool]:
    """One process, so that each test finds what the one before left."""
    pool = DecodePool(num_processes=1, bounds=Bounds(cpu_s=0.3), wall_s=20.0)
    yield pool
    pool.close()


def check_it_goes_on(pool: DecodePool) -> None:
    found = pool.submit(GOOD, WHOLE, "high").result()
    assert (found.width, found.height) == (32, 16)
    assert found.parts == (quarters().tobytes(), b"high")


def test_a_process_starts_with_the_first_image_and_serves_the_next_ones():
    pool = DecodePool(num_processes=1)
    try:
        assert pool.pids == []
        check_it_goes_on(pool)
        first = pool.pids
        check_it_goes_on(pool)
        assert pool.pids == first
        assert len(first) == 1
    finally:
        pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first[0], 0)
    with pytest.raises(EngineUnavailableError):
        pool.submit(GOOD, WHOLE, "auto")


def test_a_large_image_passes_both_ways(pool: DecodePool):
    image = quarters(2000, 1000)
    found = pool.submit(saved(image, "PNG", compress_level=0), WHOLE, "auto").result()
    assert found.parts is not None
    assert found.parts[0] == image.tobytes()


@pytest.mark.parametrize(
    "data", [b"", b"hello", GOOD[:-20], corpus.header_bomb(), corpus.animated("GIF")]
)
def test_a_bad_image_is_a_fault_and_leaves_its_process(pool: DecodePool, data: bytes):
    check_it_goes_on(pool)
    before = pool.pids
    with pytest.raises(ImageFault):
        pool.submit(data, WHOLE, "auto").result()
    check_it_goes_on(pool)
    assert pool.pids == before


def test_an_image_that_uses_too_much_processor_time_ends_its_process_alone(pool: DecodePool):
    with pytest.raises(ImageFault, match=ENDED):
        pool.submit(GOOD, Busy(), "auto").result()
    check_it_goes_on(pool)


def test_an_image_that_kills_its_process_is_a_fault(pool: DecodePool):
    with pytest.raises(ImageFault, match=ENDED):
        pool.submit(GOOD, Dying(), "auto").result()
    check_it_goes_on(pool)


def test_memory_beyond_the_bound_is_a_fault(pool: DecodePool):
    with pytest.raises(ImageFault, match="too much memory"):
        pool.submit(GOOD, Greedy(num_bytes=2 << 30), "auto").result()
    check_it_goes_on(pool)
    opened = pool.submit(GOOD, Greedy(num_bytes=1 << 20), "auto").result()
    assert opened.parts == (bytes(1 << 20),)


def test_a_process_writes_no_file(pool: DecodePool, tmp_path: Path):
    path = tmp_path / "written"
    with pytest.raises(ImageFault, match=ENDED):
        pool.submit(GOOD, Writing(path=str(path)), "auto").result()
    assert path.read_bytes() == b""


def test_a_process_that_hangs_is_killed_after_its_time():
    pool = DecodePool(num_processes=1, wall_s=0.2)
    try:
        pool.start()
        (stuck,) = pool.pids
        with pytest.raises(ImageFault, match=ENDED):
            pool.submit(GOOD, Stuck(), "auto").result()
        with pytest.raises(ProcessLookupError):
            os.kill(stuck, 0)
    finally:
        pool.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_while_idle_is_replaced(pool: DecodePool, number: signal.Signals):
    check_it_goes_on(pool)
    (before,) = pool.pids
    os.kill(before, number)
    check_it_goes_on(pool)
    assert pool.pids != [before]


def test_a_process_that_was_stopped_does_not_stop_the_server():
    pool = DecodePool(num_processes=1, wall_s=0.2)
    large = saved(quarters(1000, 1000), "PNG", compress_level=0)
    try:
        pool.start()
        os.kill(pool.pids[0], signal.SIGSTOP)
        with pytest.raises(ImageFault, match=ENDED):
            pool.submit(large, WHOLE, "auto").result()
    finally:
        pool.close()


def test_closing_ends_an_image_that_is_being_decoded():
    pool = DecodePool(num_processes=1)
    pool.start()
    doing = pool.submit(GOOD, Stuck(), "auto")
    waiting = pool.submit(GOOD, WHOLE, "auto")
    pool.close()
    with pytest.raises(EngineUnavailableError, match="server ends"):
        doing.result()
    assert waiting.cancelled() or isinstance(waiting.exception(), EngineUnavailableError)
    pool.close()


@pytest.mark.parametrize("program", ["/nonexistent/python", "/bin/true"])
def test_a_program_that_does_not_start_is_no_fault_of_the_image(program: str):
    pool = DecodePool(num_processes=1, command=(program,))
    try:
        with pytest.raises(QueueFullError, match="no process could be started"):
            pool.submit(GOOD, WHOLE, "auto").result()
    finally:
        pool.close()
