"""The cache of compiled programs on a disk that is full, and with damaged files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("compiling_child.py")


def lines_of(folder: Path, disk: str) -> list[str]:
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}
    command = (sys.executable, "-W", "default", str(CHILD), str(folder), disk)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=True)
    assert ran.stdout.split() == ["3.0", "4.0", "5.0"]
    assert "UserWarning: another warning" in ran.stderr
    return [line for line in ran.stderr.splitlines() if str(folder) in line or "cache" in line]


@pytest.mark.slow
def test_a_full_disk_is_one_line_that_says_where_and_that_serving_goes_on(tmp_path: Path):
    folder = tmp_path / "xla"
    assert lines_of(folder, "full") == [
        f"WARNING compiled programs cannot be kept in {folder} (File too large): everything else "
        f"goes on, and the next start compiles again; make room there, or set CADENZA_CACHE_DIR to "
        f"another folder"
    ]
    assert [*folder.glob("*-cache")] == []  # no part of a program, which would be read later


@pytest.mark.slow
def test_damaged_programs_are_compiled_again_and_told_in_one_line(tmp_path: Path):
    folder = tmp_path / "xla"
    assert lines_of(folder, "roomy") == []
    assert lines_of(folder, "roomy") == []
    files = [*folder.glob("*-cache")]
    assert len(files) >= 3
    for each in files:
        each.write_bytes(each.read_bytes()[:100])
    (line,) = lines_of(folder, "roomy")
    assert line.startswith(f"WARNING a compiled program in {folder} cannot be read (")
    assert "is compiled again; remove the folder" in line
