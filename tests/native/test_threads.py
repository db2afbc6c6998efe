"""The native library's threads: as many as this process may use, and asleep when idle."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza import AsyncEngine, SamplingParams
from cadenza.checkpoint.random_checkpoint import named_shape
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.process_cost import IDLE_SHARE, SHORT_IDLE_SHARE, idle_share, needs_proc

pytestmark = pytest.mark.native

COUNT_THREADS = (
    "from cadenza.backends.xla.ops.native_library import load_native_library;"
    "print(load_native_library().num_threads)"
)


def count_threads(code: str = COUNT_THREADS, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return found.stdout.strip() or found.stderr.strip().splitlines()[-1]


def test_the_environment_sets_the_number_of_threads() -> None:
    assert count_threads(CADENZA_NUM_THREADS="3") == "3"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_affinity_of_the_process_is_honoured() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]);{COUNT_THREADS}"
    assert count_threads(code) == "1"


REFUSALS = """
import os
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.errors import ConfigError

for name, value in {settings}:
    os.environ[name] = value
    try:
        load_native_library()
    except ConfigError as error:
        print(error)
    del os.environ[name]
"""


def test_an_impossible_setting_is_a_named_error() -> None:
    """Of an ISA, where the error lists the possible ones, or of the number of threads."""
    values = ("0", "-1", "two", "100000")
    settings = [("CADENZA_CPU_ISA", "avx9000")]  # first: the library keeps the ISA that it chose
    settings += [("CADENZA_NUM_THREADS", value) for value in values]
    of_isa, *of_threads = count_threads(REFUSALS.format(settings=settings)).splitlines()
    assert "CADENZA_CPU_ISA" in of_isa
    assert "scalar" in of_isa
    assert len(of_threads) == len(values)
    for value, message in zip(values, of_threads, strict=True):
        assert f"CADENZA_NUM_THREADS is {value!r}" in message


def share_of_an_idle_engine(folder: Path, seconds: float) -> float:
    async def play() -> float:
        async with AsyncEngine.from_model(folder, max_num_seqs=2, max_model_len=64) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            _ = [output async for output in engine.generate([1, 2], params)]
            return await asyncio.to_thread(idle_share, os.getpid(), seconds)

    return asyncio.run(play())


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    shape = named_shape("tiny-qwen3")
    write_random_checkpoint(shape, tmp_path / "tiny", seed=1, dtype=shape.dtype)
    return tmp_path / "tiny"


@needs_proc
@pytest.mark.soak
@pytest.mark.parametrize(("seconds", "share"), [(3.0, SHORT_IDLE_SHARE), (60.0, IDLE_SHARE)])
def test_an_idle_engine_burns_nothing(tiny_folder: Path, seconds: float, share: float) -> None:
    """By day `test_process_cost.py` looks at an idle server and its engine."""
    assert share_of_an_idle_engine(tiny_folder, seconds) < share
