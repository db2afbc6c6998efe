"""A model that several devices share gives the bits that it gives on one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.model_config import ModelConfig
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.harness import HOSTILE

GROUPED = replace(
    HOSTILE, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=216
)
# Of eight devices each has one head, and all linears a tile or two.
SINGLE = replace(GROUPED, num_kv_heads=8)
# With windows, soft caps and norms behind; its vocabulary is whole on each device.
CAPPED = replace(
    named_shape("tiny-gemma2"), num_layers=2, num_heads=8, num_kv_heads=8, intermediate_size=88
)
# With norms of queries and keys.
NORMED = replace(
    named_shape("tiny-qwen3"), num_layers=2, num_heads=16, num_kv_heads=8, intermediate_size=88
)
MODELS = {"grouped": GROUPED, "single": SINGLE, "capped": CAPPED, "normed": NORMED}
FLAGS = "--xla_force_host_platform_device_count=8"
BY_DAY = "single auto 1 8"
CASES = [
    BY_DAY,
    *("single auto 1 2 4", "single int8 1 2 4 8"),
    *("grouped auto 1 2 4", "grouped int8 1 4"),
    *("capped auto 1 2 4 8", "capped int8 1 8"),
    *("normed auto 1 2 4 8", "normed int8 1 8"),
]


def by_number_of_devices(
    folder: Path, model: ModelConfig, *counts: str, **options: object
) -> dict[str, Any]:
    write_random_checkpoint(model, folder, seed=0, dtype="float32")
    made = subprocess.run(
        [sys.executable, "-m", "tests.xla.split_child", str(folder), json.dumps(options), *counts],
        env={**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_day(CASES, {BY_DAY}))
def test_more_devices_give_the_same_bits_and_none_adds_what_it_receives(
    tmp_path: Path, case: str
) -> None:
    model, kv, *counts = case.split()
    folder = tmp_path / "model"
    made = by_number_of_devices(folder, MODELS[model], *counts, kv_cache_dtype=kv)
    one, *others = made.values()
    assert all(one["streams"])
    for more in others:
        assert one["streams"] == more["streams"]
        assert more["exchanges"] == ["all-gather"]


@pytest.mark.soak
def test_sums_across_devices_in_place_of_the_tree_change_bits(tmp_path: Path) -> None:
    """What the test before would catch."""
    one, four = by_number_of_devices(tmp_path / "model", GROUPED, "1", "4", tree="psum").values()
    assert one["streams"] != four["streams"]
    assert "all-reduce" in four["exchanges"]


@pytest.mark.soak
def test_softmax_of_all_heads_of_a_device_at_once_changes_bits(tmp_path: Path) -> None:
    """What a compiler makes of a softmax follows from its shape: of eight devices each has one
    head, and one device has all."""
    one, eight = by_number_of_devices(tmp_path / "model", SINGLE, "1", "8", tree="heads").values()
    assert one["streams"] != eight["streams"]
