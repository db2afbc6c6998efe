"""The names callers may rely on. A change here changes the public face: say so in CHANGELOG.md."""

import ast
import re
from pathlib import Path

import pytest

import cadenza

PUBLIC_NAMES = (
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineCore",
    "EngineOptions",
    "Finished",
    "LLM",
    "Logprob",
    "PoolingParams",
    "ReferenceEngine",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Token",
    "__version__",
)


def names_for_type_checkers() -> set[str]:
    """What the `if TYPE_CHECKING:` block imports: all that a type checker sees."""
    tree = ast.parse(Path(cadenza.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_public_names_are_exactly_these():
    assert tuple(sorted(cadenza.__all__)) == PUBLIC_NAMES
    assert tuple(dir(cadenza)) == PUBLIC_NAMES


def test_type_checkers_see_the_names_that_programs_see():
    assert names_for_type_checkers() == set(PUBLIC_NAMES) - {"__version__"}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_each_public_name_loads(name: str):
    assert getattr(cadenza, name) is getattr(cadenza, name)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = cadenza.Nonsense


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert cadenza.__version__ == version("cadenza")
    assert re.fullmatch(r"\d+\.\d+\.\d+", cadenza.__version__)
