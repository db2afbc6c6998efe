"""Processes keep to the plan of their memory, under limits of control groups and of the system.

Measured is private memory, sampled while a process starts and while it serves; pages of files
belong to the page cache. It may be 5 % more than was planned.
"""

import os
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from msgspec import structs

from cadenza import EngineConfig, SamplingParams
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import KVCacheDType
from cadenza.engine.process.messages import Start
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions, pinned
from cadenza.errors import ConfigError
from cadenza.loading.build import find_checkpoint, plan_model
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.engine_program import open_start
from cadenza.loading.memory import HostMemory, private_memory_bytes
from cadenza.request import Request
from cadenza.weights.weight_format import WeightDType
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.engine.process.conftest import Front
from tests.process_cost import needs_proc
from tests.server.serve_process import ServeProcess, serve_process

pytestmark = [pytest.mark.native, needs_proc]

CHILD = Path(__file__).with_name("limited_child.py")
ALLOWED = 1.05
LOAD_S = 240.0
SAMPLE_S = 0.005
MB = 1_000_000
PROMPT_LEN = 150
FEW_BYTES = 8 << 20  # of bodies: the load of the tests has short ones
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "logprobs": 5},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}},
)


class PeakWatch:
    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert self.peak_bytes > 0, "the process was never seen"

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, private_memory_bytes(self._status) or 0)


def is_kept(planned_bytes: int, peak_bytes: int) -> bool:
    return peak_bytes <= ALLOWED * planned_bytes


def version_1(root: Path, limit_bytes: int) -> None:
    write(root / "proc/self/cgroup", "4:memory:/engines\n0::/\n")
    group = root / "sys/fs/cgroup/memory/engines"
    write(group / "memory.limit_in_bytes", str(limit_bytes))
    write(group / "memory.usage_in_bytes", "0")


def version_2(root: Path, limit_bytes: int) -> None:
    write(root / "proc/self/cgroup", "0::/engines/one\n")
    group = root / "sys/fs/cgroup/engines"
    write(group / "memory.max", str(limit_bytes))
    write(group / "memory.current", "0")
    write(group / "one/memory.max", "max")
    write(group / "one/memory.current", "0")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_root(folder: Path, version: Any, limit_bytes: int) -> Path:
    write(folder / "proc/meminfo", f"MemAvailable: {1 << 30} kB\n")
    version(folder, limit_bytes)
    return folder


def measured_peak(root: Path, model: Path | None, config: EngineConfig, plan: EnginePlan) -> int:
    command = (sys.executable, str(CHILD), str(root))
    name = None if model is None else str(model)
    front = Front(ProcessLink(name, config, ProcessOptions(command=command)))
    try:
        front.wait(lambda: front.link.pid)
        pid = front.link.pid
        assert pid is not None
        with PeakWatch(pid) as watch:
            front.wait(lambda: front.engine.status().state in {"ready", "dead"}, LOAD_S)
            assert front.engine.status().state == "ready"
            num_requests = plan.limits.max_num_seqs + 8
            for at in range(num_requests):
                params = SamplingParams(
                    max_tokens=12, ignore_eos=True, **SAMPLINGS[at % len(SAMPLINGS)]
                )
                ids = tuple(3 + (at * 31 + k) % 300 for k in range(PROMPT_LEN))
                front.engine.submit(Request(prompt_token_ids=ids, params=params))
            ends = front.wait_ends(num_requests)
            assert {end.finish_reason for end in ends.values()} == {"length"}
    finally:
        front.stop()
    return watch.peak_bytes


def check_engine(folder: Path, version: Any, model: Path | None, config: EngineConfig) -> None:
    """With half of what it would take without a limit."""
    checkpoint = find_checkpoint(model)
    free = plan_model(checkpoint, config, memory=HostMemory(make_root(folder, version, 1 << 40)))
    limit_bytes = free.planned_bytes - free.kv_bytes // 2
    root = make_root(folder, version, limit_bytes)
    plan = plan_model(checkpoint, config, memory=HostMemory(root))
    assert plan.planned_bytes <= limit_bytes
    assert plan.kv_bytes < free.kv_bytes
    planned_bytes = plan.planned_bytes - plan.footprint.front_end_bytes
    peak_bytes = measured_peak(root, model, config, plan)
    print(f"planned {planned_bytes / MB:.1f} MB, peak {peak_bytes / MB:.1f} MB")
    assert is_kept(planned_bytes, peak_bytes)
    # The controls: a plan that lacks the pool, and one for twice as much, would be noticed.
    assert not is_kept(planned_bytes - plan.kv_bytes - plan.weight_bytes, peak_bytes)
    assert peak_bytes > planned_bytes / 2


BUNDLED = EngineConfig(
    max_num_seqs=128, max_model_len=2048, max_num_queued_reqs=1024, max_num_queued_tokens=1 << 18
)


@pytest.mark.parametrize("version", [pytest.param(version_1, marks=pytest.mark.soak), version_2])
def test_an_engine_keeps_to_a_plan_for_its_control_group(tmp_path: Path, version: Any) -> None:
    """By day in one version: an engine knows no more of the other than the bytes of its limit."""
    check_engine(tmp_path, version, None, BUNDLED)


def test_both_versions_of_control_groups_give_the_same_plan(tmp_path: Path) -> None:
    checkpoint, limit_bytes = find_checkpoint(None), 400 * MB
    plans = [
        plan_model(
            checkpoint,
            BUNDLED,
            memory=HostMemory(make_root(tmp_path / version.__name__, version, limit_bytes)),
        )
        for version in (version_1, version_2)
    ]
    assert plans[0] == plans[1]
    assert plans[0].planned_bytes <= limit_bytes
    free = HostMemory(make_root(tmp_path / "free", version_1, 1 << 40))
    assert plan_model(checkpoint, BUNDLED, memory=free).planned_bytes > limit_bytes


def test_a_group_too_small_for_the_engine_is_refused_with_what_to_set(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(None)
    least = EngineConfig(
        max_num_seqs=1, num_pages=1, max_num_queued_reqs=1, max_num_queued_tokens=1
    )
    needed = plan_model(checkpoint, least).planned_bytes
    memory = HostMemory(make_root(tmp_path, version_2, needed + 8 * MB))
    with pytest.raises(ConfigError, match=r"; set --max-num-seqs (\d+)$") as refused:
        plan_model(checkpoint, EngineConfig(max_num_seqs=512), memory=memory)
    (most,) = map(int, re.findall(r"\d+$", str(refused.value)))
    assert plan_model(checkpoint, EngineConfig(max_num_seqs=most), memory=memory)
    less = HostMemory(make_root(tmp_path, version_2, needed + 7 * MB))
    assert plan_model(checkpoint, EngineConfig(max_num_seqs=most), memory=less)


def test_a_restart_keeps_the_plan_of_the_first_start_when_less_is_free(tmp_path: Path) -> None:
    first = plan_model(find_checkpoint(None), EngineConfig(max_num_seqs=8))
    limits = first.limits
    config = pinned(EngineConfig(max_num_seqs=8), limits)
    memory = HostMemory(make_root(tmp_path, version_2, first.planned_bytes // 2))
    start = Start(model=None, config=config, log_level=0)
    with pytest.raises(ConfigError, match=r"; (set|free) "):
        open_start(start, memory=memory)
    kept = open_start(structs.replace(start, is_restart=True), memory=memory).plan
    assert kept.limits == limits


def test_what_the_front_end_has_is_counted_once_and_its_bodies_are(tmp_path: Path) -> None:
    memory = HostMemory(make_root(tmp_path, version_2, 1500 * MB))
    start = Start(model=None, config=EngineConfig(max_num_seqs=512), log_level=0)

    def opened(**told: int) -> EnginePlan:
        return open_start(structs.replace(start, **told), memory=memory).plan

    plain, front_end = opened(), opened(front_end_bytes=40 * MB)
    assert front_end.available_bytes == plain.available_bytes + 40 * MB
    most = opened(front_end_bytes=10_000 * MB)
    assert most.available_bytes == plain.available_bytes + plain.footprint.front_end_bytes
    bodies = opened(bodies_bytes=100 * MB)
    assert bodies.footprint.bodies_bytes == 100 * MB
    assert bodies.kv_bytes < plain.kv_bytes < front_end.kv_bytes


def planned_bytes(serving: ServeProcess) -> tuple[int, int]:
    """In all and at the start, as the engine's line of the start tells it."""
    said = r"; ([0-9.,]+) MiB planned in all, ([0-9.,]+) MiB of them"
    (told,) = set(re.findall(said, serving.log))
    in_all, at_start = (round(float(each.replace(",", "")) * (1 << 20)) for each in told)
    return in_all, at_start


def private_bytes(*pids: int) -> int:
    return sum(private_memory_bytes(Path(f"/proc/{pid}/status")) or 0 for pid in pids)


def load(serving: ServeProcess, num_requests: int) -> None:
    name = serving.get("/v1/models").json()["data"][0]["id"]

    def ask(at: int) -> int:
        sampling = dict(SAMPLINGS[at % len(SAMPLINGS)])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {"5": 1.0}
        prompt = [3 + (at * 31 + k) % 300 for k in range(PROMPT_LEN)]
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **sampling}
        return serving.post("/v1/completions", body).status_code

    with ThreadPoolExecutor(num_requests) as threads:
        assert set(threads.map(ask, range(num_requests))) == {200}


def check_server(*arguments: object, before: tuple[str, ...] = (), num_requests: int = 64) -> None:
    with serve_process(*arguments, before=before) as serving:
        with PeakWatch(serving.process.pid) as front, PeakWatch(serving.engine_pid()) as engine:
            serving.wait_for(lambda: serving.status("/ready") == 200, LOAD_S)
            idle_bytes = private_bytes(serving.process.pid, serving.engine_pid())
            load(serving, num_requests)
        planned, at_start = planned_bytes(serving)
    peak_bytes = front.peak_bytes + engine.peak_bytes
    print(f"planned {planned / MB:.1f} MB, peak {peak_bytes / MB:.1f} MB")
    print(f"planned for the start {at_start / MB:.1f} MB, idle {idle_bytes / MB:.1f} MB")
    assert is_kept(planned, peak_bytes)
    assert is_kept(at_start, idle_bytes)
    # The controls: a plan for twice as much at the start would be noticed, and half a pool.
    assert idle_bytes > at_start / 2
    assert not is_kept(at_start, idle_bytes + (planned - at_start) // 2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="this system has no prlimit")
@pytest.mark.parametrize(
    ("limit", "limit_mb"), [("data", 1300), pytest.param("as", 3000, marks=pytest.mark.soak)]
)
def test_a_server_keeps_to_its_plan_below_a_limit_that_the_system_enforces(
    limit: str, limit_mb: int
) -> None:
    """The pool of 512 rows of 2,048 tokens, 2.1 GB, does not fit and becomes smaller."""
    before = ("prlimit", f"--{limit}={limit_mb * MB}")
    check_server("--max-num-seqs", 512, "--max-bodies-bytes", FEW_BYTES, before=before)


@pytest.mark.soak
@pytest.mark.parametrize("flags", [(), ("--quantization", "int4"), ("--kv-cache-dtype", "int8")])
def test_a_server_of_a_larger_shape_keeps_to_its_plan(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "shape"
    write_random_checkpoint(named_shape("smollm2-135m"), folder, seed=1, dtype="bfloat16")
    few = ("--max-bodies-bytes", FEW_BYTES)
    check_server(folder, *flags, *few, "--max-model-len", 2048, num_requests=8)


@pytest.mark.soak
@pytest.mark.parametrize("version", [version_1, version_2])
def test_an_engine_of_a_larger_shape_keeps_to_its_plan(tmp_path: Path, version: Any) -> None:
    folder = tmp_path / "shape"
    write_random_checkpoint(named_shape("smollm2-135m"), folder, seed=1, dtype="bfloat16")
    config = EngineConfig(max_num_seqs=16, max_model_len=512, quantization="int4")
    check_engine(tmp_path, version, folder, config)


@pytest.mark.soak
def test_an_engine_of_a_hybrid_keeps_to_its_plan(tmp_path: Path) -> None:
    """Half of what it takes are states of rows and snapshots."""
    folder, shape = tmp_path / "shape", named_shape("qwen3.5-0.8b")
    small = replace(shape, num_layers=8, vocab_size=8192, eos_token_ids=(2,))
    write_random_checkpoint(small, folder, seed=1, dtype="bfloat16")
    check_engine(tmp_path, version_2, folder, EngineConfig(max_num_seqs=24, max_model_len=8192))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_take_no_memory_until_they_are_written(
    dtype: WeightDType, kv_cache_dtype: KVCacheDType
) -> None:
    spec = DecoderSpec(
        model=find_checkpoint(None).config,
        dtype=jnp.dtype(dtype).type,
        page_size=16,
        kv_cache_dtype=kv_cache_dtype,
    )
    num_pages = 200 * MB // (16 * spec.model.kv_bytes_per_token(dtype, kv_cache_dtype))

    def taken_bytes(fill: float | None) -> int:
        before = private_bytes(os.getpid())
        (group,) = spec.model.kv_groups
        pool = jax.jit(lambda: NativeOps(spec).new_kv_pool(group, num_pages, fill))()
        jax.block_until_ready(pool)
        return private_bytes(os.getpid()) - before

    assert taken_bytes(None) < 20 * MB
    # The control. Memory that earlier tests freed may be taken again.
    assert taken_bytes(0.0) > 80 * MB
