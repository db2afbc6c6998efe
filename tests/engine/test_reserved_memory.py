"""Engines count what others on the machine have planned for and not taken yet."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cadenza import EngineConfig
from cadenza.loading.build import find_checkpoint, plan_model, reserve_planned
from cadenza.loading.memory import HostMemory, Reserved, find_reserved, record_reservation

MB = 1_000_000
GROUP = "0::/engines\n"


def make_root(folder: Path, *, group: str = GROUP, held_bytes: int = 0) -> Path:
    """A machine in which this process holds so many bytes of private memory."""
    for process in ("self", str(os.getpid())):
        (folder / "proc" / process / "ns").mkdir(parents=True, exist_ok=True)
        status = f"RssAnon:\t{held_bytes // 1024} kB\n"
        (folder / "proc" / process / "status").write_text(status)
    (folder / "proc/self/cgroup").write_text(group)
    namespace = folder / "proc/self/ns/pid"
    if not namespace.is_symlink():
        namespace.symlink_to("pid:[7]")
    return folder


def test_what_an_engine_does_not_hold_yet_is_reserved_until_it_is_closed(tmp_path: Path):
    root, folder = make_root(tmp_path / "root", held_bytes=300 * 1024), tmp_path / "engines"
    assert find_reserved(folder, root) == Reserved()
    with closing(record_reservation(folder, 1000 * 1024, root)):
        assert find_reserved(folder, root) == Reserved(in_all=700 * 1024, in_group=700 * 1024)
        with closing(record_reservation(folder, 500 * 1024, root)):  # of the same process
            assert find_reserved(folder, root).in_all == 1200 * 1024
        make_root(root, held_bytes=2000 * 1024)
        assert find_reserved(folder, root) == Reserved()
    assert list(folder.iterdir()) == []


def test_a_reservation_that_nothing_refers_to_has_ended(tmp_path: Path):
    root, folder = make_root(tmp_path / "root"), tmp_path / "engines"
    reservation = record_reservation(folder, MB, root)
    assert find_reserved(folder, root).in_all == MB
    del reservation
    assert find_reserved(folder, root) == Reserved()


def test_an_engine_in_another_control_group_is_counted_for_the_machine_only(tmp_path: Path):
    root, folder = make_root(tmp_path / "root"), tmp_path / "engines"
    with closing(record_reservation(folder, 5 * MB, root)):
        make_root(root, group="0::/others\n")
        assert find_reserved(folder, root) == Reserved(in_all=5 * MB)


def test_an_engine_of_another_namespace_is_not_counted(tmp_path: Path):
    root, folder = make_root(tmp_path / "root"), tmp_path / "engines"
    with closing(record_reservation(folder, 5 * MB, root)):
        (root / "proc/self/ns/pid").unlink()
        (root / "proc/self/ns/pid").symlink_to("pid:[8]")
        assert find_reserved(folder, root) == Reserved()


DYING = """
import os, sys
from pathlib import Path
from cadenza.loading.memory import find_reserved, record_reservation
reservation = record_reservation(Path(sys.argv[1]), 1 << 40)
assert find_reserved(Path(sys.argv[1])).in_all > 1 << 39
os._exit(9)
"""


FULL = """
import resource, sys
from pathlib import Path
from cadenza.loading.memory import record_reservation
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
record_reservation(Path(sys.argv[1]), 1 << 40)
"""


def test_no_file_is_left_of_a_reservation_that_cannot_be_written(tmp_path: Path):
    subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_engine_that_was_killed_reserves_nothing(tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    assert find_reserved(tmp_path) == Reserved()
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_files_reservation_nothing(tmp_path: Path):
    root, folder = make_root(tmp_path / "root"), tmp_path / "engines"
    with closing(record_reservation(folder, 5 * MB, root)):
        (own,) = folder.iterdir()
        for number, content in enumerate((b"", b"{", b"[]", b'{"pid": "x"}', json.dumps({}))):
            name = folder / f"foreign{number}"
            name.write_bytes(content.encode() if isinstance(content, str) else content)
        assert find_reserved(folder, root).in_all == 5 * MB
        assert list(folder.iterdir()) == [own]
        for content in (b"{", b"[]", b'{"pid": 1e999}'):
            own.write_bytes(content)
            assert find_reserved(folder, root) == Reserved()


def test_where_nothing_can_be_written_nothing_is_reserved(tmp_path: Path):
    (tmp_path / "file").write_text("")
    record_reservation(tmp_path / "file" / "engines", MB).close()
    assert find_reserved(tmp_path / "file" / "engines") == Reserved()


def test_another_engines_pool_is_left_out_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path / "cache"))
    root = make_root(tmp_path / "root")
    (root / "proc/meminfo").write_text(f"MemAvailable: {2000 * MB // 1024} kB\n")
    config, checkpoint = EngineConfig(max_num_seqs=512), find_checkpoint(None)

    def available() -> int:
        return plan_model(checkpoint, config, memory=HostMemory(root)).available_bytes

    alone = plan_model(checkpoint, config, memory=HostMemory(root))
    with closing(record_reservation(tmp_path / "cache/engines", 700 * MB, root)):
        assert available() == alone.available_bytes - 700 * MB
    assert available() == alone.available_bytes
    with closing(reserve_planned(alone)):
        (file,) = (tmp_path / "cache/engines").iterdir()
        told = json.loads(file.read_bytes())["bytes"]
        footprint = alone.footprint
        assert told == alone.planned_bytes - footprint.front_end_bytes - footprint.bodies_bytes
