"""A model that several devices share gives the bits that it gives on one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.random_checkpoint import write_random_checkpoint
from tests.xla.harness import HOSTILE

SHARED = replace(
    HOSTILE, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=216
)
FLAGS = "--xla_force_host_platform_device_count=4"


def by_number_of_devices(folder: Path, tree: str, *counts: str) -> dict[str, Any]:
    """What the child gives, whose process has four devices of a CPU."""
    write_random_checkpoint(SHARED, folder, seed=0, dtype="float32")
    made = subprocess.run(
        [sys.executable, "-m", "tests.xla.split_child", str(folder), tree, *counts],
        env={**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [("1", "4"), pytest.param(("1", "2"), marks=pytest.mark.soak)])
def test_more_devices_give_the_same_bits_and_none_adds_what_it_receives(
    tmp_path: Path, counts: tuple[str, str]
) -> None:
    one, more = by_number_of_devices(tmp_path / "model", "tree", *counts).values()
    assert all(one["streams"])
    assert one["streams"] == more["streams"]
    assert more["exchanges"] == ["all-gather"]


@pytest.mark.soak
def test_sums_across_devices_in_place_of_the_tree_change_bits(tmp_path: Path) -> None:
    """What the test before would catch."""
    one, four = by_number_of_devices(tmp_path / "model", "psum", "1", "4").values()
    assert one["streams"] != four["streams"]
    assert "all-reduce" in four["exchanges"]
