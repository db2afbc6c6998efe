"""What `import cadenza` may load, seen from fresh interpreters."""

import subprocess
import sys

import pytest

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
MAX_NEW_MODULES = 40
"""Bounds the cost without a clock; `typing` and `importlib` account for those of today."""


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
