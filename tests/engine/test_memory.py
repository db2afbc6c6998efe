"""Free memory as the system and its control groups tell it, in a made-up system."""

import os
import resource
from pathlib import Path

import pytest

from cadenza.loading.memory import HostMemory, available_memory_bytes, usable_cores

GIB = 1 << 30


def system(root: Path, files: dict[str, object]) -> Path:
    """A root of a file system with these files, on a machine with 8 GiB free."""
    for name, content in {"proc/meminfo": f"MemAvailable: {8 << 20} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def group(folder: str, limit: object, usage: int, cached: int = 0) -> dict[str, object]:
    return {
        f"sys/fs/cgroup/{folder}/memory.max": limit,
        f"sys/fs/cgroup/{folder}/memory.current": usage,
        f"sys/fs/cgroup/{folder}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def test_without_groups_the_machine_tells(tmp_path: Path):
    assert available_memory_bytes(system(tmp_path, {})) == 8 * GIB


def test_the_groups_limit_is_honoured(tmp_path: Path):
    files = {"proc/self/cgroup": "0::/a/b\n", **group("a/b", 3 * GIB, GIB)}
    assert available_memory_bytes(system(tmp_path, files)) == 2 * GIB


def test_a_parents_limit_counts_for_its_children(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        **group("a/b", "max", GIB),
        **group("a", 4 * GIB, 3 * GIB),
    }
    assert available_memory_bytes(system(tmp_path, files)) == GIB


def test_files_that_were_read_are_not_used_memory(tmp_path: Path):
    files = {"proc/self/cgroup": "0::/a\n", **group("a", 3 * GIB, 3 * GIB, cached=2 * GIB)}
    assert available_memory_bytes(system(tmp_path, files)) == 2 * GIB


def test_the_older_control_groups_are_read_too(tmp_path: Path):
    folder = "sys/fs/cgroup/memory/x"
    files: dict[str, object] = {
        "proc/self/cgroup": "4:cpu,memory:/x\n2:cpu:/y\n",
        f"{folder}/memory.limit_in_bytes": 2 * GIB,
        f"{folder}/memory.usage_in_bytes": GIB,
    }
    assert available_memory_bytes(system(tmp_path, files)) == GIB


@pytest.mark.parametrize("content", ["", "garbage", "0::/../../etc\n", "x:y\n0::\n"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, content: str):
    files = {"proc/self/cgroup": content, **group("a", "", 0)}
    assert available_memory_bytes(system(tmp_path, files)) == 8 * GIB


@pytest.mark.parametrize(
    ("which", "used"), [(resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")]
)
def test_the_limits_of_the_process_are_honoured(tmp_path: Path, which: int, used: str):
    """And what is reserved without being touched is left."""

    def left(limit: int) -> int:
        def get_limit(asked: int) -> tuple[int, int]:
            return (limit if asked == which else resource.RLIM_INFINITY), resource.RLIM_INFINITY

        return available_memory_bytes(root, get_limit)

    root = system(tmp_path, {"proc/self/status": f"{used}:\t 1048576 kB\nRssAnon:\t 3 kB\n"})
    assert left(1 << 50) == left(resource.RLIM_INFINITY) == 8 * GIB
    assert 0 < left(6 * GIB) < 5 * GIB
    assert left(6 * GIB) - left(5 * GIB) == GIB
    assert left(GIB) == 0


def test_a_process_holds_what_its_status_tells(tmp_path: Path):
    assert HostMemory(tmp_path).held_bytes == 0
    assert HostMemory(system(tmp_path, {"proc/self/status": "RssAnon: 3 kB\n"})).held_bytes == 3072


def test_what_processes_have_is_counted_as_far_as_a_plan_counts_it(tmp_path: Path):
    root = system(tmp_path, {"proc/self/status": "RssAnon: 3 kB\n"})

    def taken(front_end_bytes: int | None, process_bytes: int = 9000) -> int:
        memory = HostMemory(root, front_end_bytes=front_end_bytes)
        return memory.taken_bytes(process_bytes=process_bytes, front_end_bytes=500)

    assert taken(400) == 3072 + 400
    assert taken(600) == 3072 + 500
    assert taken(600, process_bytes=2000) == 2000 + 500
    assert taken(0) == 3072
    assert taken(None) == 3072
    assert taken(None, process_bytes=2000) == 2000 + 500


def test_threads_that_were_started_are_not_reserved_again(tmp_path: Path):
    def get_limit(asked: int) -> tuple[int, int]:
        return (6 * GIB if asked == resource.RLIMIT_AS else resource.RLIM_INFINITY), 0

    def left(num_threads: int) -> int:
        status = f"VmSize:\t 1048576 kB\nThreads:\t {num_threads}\n"
        return available_memory_bytes(system(tmp_path, {"proc/self/status": status}), get_limit)

    assert left(1) - left(0) == 72 << 20
    assert left(1 << 20) == 5 * GIB - (320 << 20)


def test_cores_are_those_of_the_mask_and_of_the_threads_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 256)
    assert usable_cores({}) == 3
    assert usable_cores({"CADENZA_NUM_THREADS": "2"}) == 2
    assert usable_cores({"CADENZA_NUM_THREADS": "64"}) == 3
