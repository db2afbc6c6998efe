"""The extras that the documents and messages tell people to install are there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", ["README.md", "docs/serving.md"])
def test_every_extra_that_a_document_names_exists(name: str):
    named = set(re.findall(r"cadenza\[(\w+)\]", (ROOT / name).read_text()))
    assert named <= set(EXTRAS)
    assert {"cuda", "tpu"} <= set(EXTRAS)
