"""What an engine process and a server cost: nothing when idle, and no second copy of anything."""

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cadenza import EngineConfig, SamplingParams
from cadenza.engine.process.process_link import ProcessLink
from cadenza.loading.build import find_checkpoint, plan_model
from cadenza.loading.engine_plan import EnginePlan
from cadenza.request import Request
from tests.engine.process.conftest import Front
from tests.process_cost import (
    IDLE_SHARE,
    SHORT_IDLE_SHARE,
    cpu_s,
    idle_share,
    needs_proc,
    private_bytes,
)
from tests.server.serve_process import serve_process

pytestmark = [pytest.mark.native, needs_proc]

OWN_BYTES = 500_000_000  # what an engine process may hold beside its weights and its pool
CONFIG = EngineConfig(max_num_seqs=8, max_model_len=512, num_pages=20_000)
LOAD_S = 240.0
COMPLETION = {"model": "bundled", "prompt": "One", "max_tokens": 8, "ignore_eos": True}


def idle_server_shares(seconds: float) -> list[float]:
    with serve_process() as serving:
        serving.wait_ready()
        assert serving.post("/v1/completions", COMPLETION).status_code == 200
        pids = [serving.process.pid, serving.engine_pid()]
        shares = [idle_share(pid, seconds) for pid in pids]
        assert serving.status("/ready") == 200
    return shares


def test_an_idle_server_burns_nothing_in_either_process() -> None:
    assert max(idle_server_shares(3.0)) < SHORT_IDLE_SHARE


@pytest.mark.soak
def test_a_server_idle_for_a_minute_burns_nothing_in_either_process() -> None:
    shares = idle_server_shares(60.0)
    print(f"front end and engine, of a core: {shares}")
    assert max(shares) < IDLE_SHARE


def test_a_thread_that_seldom_sleeps_is_noticed() -> None:
    """The control: 50 ms of work in each half second, on another thread of this process."""

    def work() -> None:
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        worked.set()
        is_over.wait()

    def wait_for_work(seconds: float) -> float:
        thread = threading.Thread(target=work)
        thread.start()
        threads.append(thread)
        worked.wait()
        worked.clear()
        return seconds

    worked, is_over = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    share = idle_share(os.getpid(), 1.5, wait_for_work)
    is_over.set()
    for thread in threads:
        thread.join()
    assert share > SHORT_IDLE_SHARE


def served_bytes(model: Path | None, config: EngineConfig) -> int:
    front = Front(ProcessLink(None if model is None else str(model), config))
    front.wait(lambda: front.engine.status().state in {"ready", "dead"}, LOAD_S)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for row in range(config.max_num_seqs):
        front.engine.submit(Request(prompt_token_ids=(*range(3, 40), row + 3), params=params))
    front.wait_ends(config.max_num_seqs)
    pid = front.link.pid
    assert pid is not None
    found = private_bytes(pid)
    front.stop()
    return found


def check_memory(model: Path | None) -> tuple[EnginePlan, int]:
    plan = plan_model(find_checkpoint(model), CONFIG)
    assert plan.kv_bytes > OWN_BYTES, "a second pool would not be noticed"
    held = served_bytes(model, CONFIG)
    assert held < plan.weight_bytes + plan.kv_bytes + OWN_BYTES
    return plan, held


def test_an_engine_process_holds_weights_pool_and_no_second_copy_of_it() -> None:
    check_memory(None)


def test_memory_of_ones_own_is_noticed() -> None:
    before = private_bytes(os.getpid())
    # Not from the heap, which may have had that much to give again.
    block = np.frombuffer(mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    block.fill(1)
    assert private_bytes(os.getpid()) - before > 0.9 * block.nbytes


def test_cpu_seconds_are_those_of_the_processs_own_clock() -> None:
    outer_s, before_s, inner_s = time.process_time(), cpu_s(os.getpid()), time.process_time()
    while time.process_time() < inner_s + 0.1:
        pass
    inner_s = time.process_time() - inner_s
    found_s = cpu_s(os.getpid()) - before_s
    outer_s = time.process_time() - outer_s
    assert inner_s - 0.05 < found_s < outer_s + 0.05
