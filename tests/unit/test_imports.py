"""What `import cadenza` may load, and the public names: a change of these goes to CHANGELOG.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cadenza

HEAVY = frozenset(
    {
        "asyncio",
        "jax",
        "jaxlib",
        "jinja2",
        "ml_dtypes",
        "mlx",
        "numpy",
        "rich",
        "safetensors",
        "scipy",
        "tokenizers",
        "torch",
        "transformers",
        "typer",
    }
)
# Bounds the cost without a clock; `typing` and `importlib` account for those of today.
MAX_NEW_MODULES = 40


def modules_loaded_by(statement: str) -> frozenset[str]:
    """The modules a fresh interpreter holds after `statement` and did not hold before it."""
    script = (
        "import sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return frozenset(run.stdout.split())


def test_import_cadenza_loads_no_array_library_and_nothing_heavy():
    roots = {name.partition(".")[0] for name in modules_loaded_by("import cadenza")}
    assert not roots & HEAVY


def test_import_cadenza_loads_few_modules_and_no_other_of_its_own():
    loaded = modules_loaded_by("import cadenza")
    assert {name for name in loaded if name.startswith("cadenza")} == {"cadenza"}
    assert len(loaded) <= MAX_NEW_MODULES, sorted(loaded)


@pytest.mark.parametrize("name", ["SamplingParams", "Request", "EngineConfig", "Token"])
def test_a_value_of_layer_1_loads_no_array_library(name: str):
    loaded = modules_loaded_by(f"from cadenza import {name}")
    assert not {module.partition(".")[0] for module in loaded} & (HEAVY - {"asyncio"})


def test_the_measurement_sees_a_heavy_module_when_one_is_loaded():
    assert "numpy" in modules_loaded_by("import cadenza; import numpy")


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
