"""Runs a module that prints what it computed once for each instruction set: `run_on_each`."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_on_each(
    isas: Iterable[str], variable: str, module: str, *arguments: str
) -> dict[str, tuple[int, str]]:
    """The number of results and their digest, by instruction set, which `variable` chooses.

    `module` prints the instruction set that it used, then both.
    """
    found: dict[str, tuple[int, str]] = {}
    for isa in isas:
        ran = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, variable: isa},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        used, count, digest = ran.stdout.split()
        assert used == isa
        found[isa] = int(count), digest
    return found
