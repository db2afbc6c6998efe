"""The package is on no index: nothing says to install it by its name, which would be another's."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from cadenza.backends.exporting import REQUIREMENT as IREE_COMPILER
from cadenza.backends.iree.backend import REQUIREMENT as IREE_RUNTIME
from cadenza.backends.mlx.backend import MlxBackend
from cadenza.backends.xla.device import find_device
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import ConfigError, DeviceUnavailableError
from tests.docs.documents import PAGES, ROOT

INSTALL = re.compile(r"\b(?:pip3? install|uv add|uv tool install|pipx install|uvx)\s+([^`\n]+)")
SUFFIXES = {".py", ".md", ".toml", ".yml", ".mjs", ".in", ".sh", ""}
FOLDERS = ("src", "examples", "tools", "benchmarks", ".github")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def texts() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    sources = [path for path in inside if path.suffix in SUFFIXES]
    return [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile", ROOT / "Makefile", *sources]


def installed(text: str) -> list[str]:
    """The names of the packages that a text says to install from an index."""
    found: list[str] = []
    for command in INSTALL.findall(text):
        for word in re.split(r"\s+", command.replace("'", "").replace('"', "")):
            try:
                found.append(canonicalize_name(Requirement(word.rstrip(",;.")).name))
            except InvalidRequirement:
                continue
    return found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`pip install 'cadenza[cuda]'`", ["cadenza"]),
        ("run `pip install Cadenza==1.0` now", ["cadenza"]),
        ("uv add cadenza", ["cadenza"]),
        ("pip install '.[cuda]'", []),
        ("pip install 'PATH/TO/cadenza-….whl[cuda]'", []),
    ],
)
def test_a_bare_name_is_told_from_a_path(text: str, names: list[str]) -> None:
    assert installed(text) == names


def test_nothing_says_to_install_the_package_by_its_bare_name() -> None:
    found = [path for path in texts() if "cadenza" in installed(path.read_text(encoding="utf-8"))]
    assert found == []


def names_of(extra: str) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in EXTRAS[extra]}


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_the_remedy_for_a_device_that_is_not_there_is_what_its_extra_installs(kind: str) -> None:
    with pytest.raises(DeviceUnavailableError) as refusal:
        find_device(f"{kind}:99")
    (requirement,) = EXTRAS[kind]
    assert f"Remedy: pip install '{requirement}', or " in str(refusal.value)


def test_the_remedy_for_pictures_names_the_packages_of_its_extra() -> None:
    source = (ROOT / "tools" / "result_tables.py").read_text()
    assert set(installed(source)) == names_of("plot")


def test_the_remedy_of_the_mlx_backend_names_the_packages_of_its_extra() -> None:
    backend = MlxBackend(find=lambda _: None)
    with pytest.raises(ConfigError) as refusal:
        backend.describe("auto", "auto", open_checkpoint(None))
    (command,) = re.findall(r"pip install .*?,", str(refusal.value))
    words = [Requirement(word) for word in shlex.split(command.removesuffix(","))[2:]]
    assert {canonicalize_name(word.name) for word in words} == names_of("mlx")


def test_the_remedies_of_the_iree_backend_are_what_its_extras_install() -> None:
    assert EXTRAS["iree"] == [IREE_RUNTIME]
    assert EXTRAS["iree-export"] == [IREE_COMPILER]


def test_the_extras_that_documents_name_exist_and_each_accelerator_has_one() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:'\.|\.whl)\[(\w+)\]", pages))
    assert {"cuda", "tpu", "mlx"} <= named <= set(EXTRAS)
