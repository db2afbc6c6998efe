"""The Dockerfile, without a builder: what it copies is there and is sent to the builder."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cadenza.cli.serve_flags import ServeFlags

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
PACKAGE = "benchmarks/cadenza_bench"
PACKAGING = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def lines_of(instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)


def copied() -> list[str]:
    """What is copied from the folder that is built from."""
    return [name for line in lines_of("COPY") if "--from" not in line for name in line.split()[:-1]]


def is_ignored(name: str) -> bool:
    """Whether .dockerignore leaves out a name; its last line that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.removeprefix("!")):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("name", copied())
def test_what_is_copied_is_there_and_is_sent(name: str):
    assert (ROOT / name).exists()
    assert not is_ignored(name)


def test_what_is_not_copied_is_not_sent():
    others = {path.name for path in ROOT.iterdir()} - set(copied())
    assert {"tests", ".git"} <= others
    assert [name for name in sorted(others) if not is_ignored(name)] == []


def test_the_packages_own_files_are_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {project["readme"], *project["license-files"], *PACKAGING, "src", "csrc", PACKAGE}
    assert named <= set(copied())


def test_the_server_is_no_root_and_is_asked_for_its_health_at_its_port():
    assert lines_of("USER") == ["cadenza"]
    assert json.loads(lines_of("ENTRYPOINT")[0]) == ["cadenza", "serve"]
    assert lines_of("EXPOSE") == [str(ServeFlags().port)]
    probe = json.loads(re.sub(r".*CMD ", "", lines_of("HEALTHCHECK")[0]))
    compile(probe[-1], "probe", "exec")
    assert f"'CADENZA_PORT', {ServeFlags().port})}}/health" in probe[-1]


def test_each_stage_has_the_python_that_the_lock_is_for():
    images = [line.split()[0] for line in lines_of("FROM")]
    assert images == ["python:3.11-slim"] * 2
