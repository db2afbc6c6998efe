"""SECURITY.md: each default has a test that exists."""

import ast
import re

import pytest

from tests.docs.documents import ROOT

NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())


def test_defaults_have_tests() -> None:
    assert len(NAMED) >= 10


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
