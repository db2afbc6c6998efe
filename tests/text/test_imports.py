"""What importing costs, in a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = {"tokenizers", "jinja2", "jax", "torch", "transformers"}


@pytest.mark.parametrize("package", ["cadenza.text", "cadenza.checkpoint"])
def test_importing_a_package_loads_nothing_heavy(package: str):
    code = f"import sys, {package}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert package in result.stdout.split()
    assert HEAVY.isdisjoint(result.stdout.split())
