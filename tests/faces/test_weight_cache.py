"""Weights that `--quantization` makes are kept for later starts: names, bounds, equal bits."""

import os
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from cadenza import LLM, SamplingParams
from cadenza.backends import find_backend
from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.build import open_planned
from cadenza.loading.identity import identify
from cadenza.loading.planned_engine import MIN_WEIGHT_BYTES, packed_weights_file
from cadenza.models.layer_kind import LayerKind
from tests.checkpoint.config_writer import write_random_checkpoint

ENOUGH = MIN_WEIGHT_BYTES
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=3)


@pytest.fixture
def setup(tmp_path: Path) -> RunnerSetup:
    engine = open_planned(None, EngineConfig(quantization="int4", max_model_len=64, num_pages=64))
    return replace(engine.setup(), cache_folder=tmp_path)


def file_for(setup: RunnerSetup, num_bytes: int = ENOUGH, **options: Any) -> Path | None:
    checkpoint, backend = open_checkpoint(None), find_backend("auto")
    traits = backend.describe("auto", "auto", checkpoint)
    return packed_weights_file(
        setup,
        EngineConfig(**options),
        num_bytes,
        lambda: identify(checkpoint, setup, backend, traits),
    )


def keep(folder: Path, name: str, num_bytes: int, used_s: int) -> Path:
    path = folder / "weights" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)
    os.utime(path, (used_s, used_s))
    return path


def test_a_file_is_named_for_what_its_content_depends_on(setup: RunnerSetup):
    others = [
        replace(setup, quantization="int8"),
        replace(setup, dtype="float32" if setup.dtype == "bfloat16" else "bfloat16"),
        replace(setup, arithmetic="portable"),
    ]
    paths = {file_for(each) for each in (setup, *others)}
    assert None not in paths
    assert len(paths) == 4
    assert file_for(setup) == file_for(replace(setup, fill=1.0)) in paths


def test_a_file_of_another_revision_of_the_arithmetic_has_another_name(
    setup: RunnerSetup, monkeypatch: pytest.MonkeyPatch
):
    before = file_for(setup)
    monkeypatch.setattr("cadenza.loading.identity.ARITHMETIC_REVISION", 0)
    assert file_for(setup) != before


def test_weights_that_are_not_quantised_or_are_small_are_not_kept(setup: RunnerSetup):
    assert file_for(setup) is not None
    assert file_for(replace(setup, quantization="none")) is None
    assert file_for(replace(setup, cache_folder=None)) is None
    assert file_for(setup, ENOUGH - 1) is None
    assert file_for(setup, weight_cache_bytes=0) is None
    assert file_for(setup, 2 * ENOUGH, weight_cache_bytes=2 * ENOUGH - 1) is None


def test_what_was_not_used_for_the_longest_time_makes_room(setup: RunnerSetup, tmp_path: Path):
    old = keep(tmp_path, "a.packed", ENOUGH, used_s=1_000)
    newer = keep(tmp_path, "b.packed", ENOUGH, used_s=2_000)
    assert file_for(setup, weight_cache_bytes=3 * ENOUGH) is not None
    assert old.exists()
    assert newer.exists()
    assert file_for(setup, weight_cache_bytes=3 * ENOUGH - 1) is not None
    assert not old.exists()
    assert newer.exists()


def test_files_that_were_never_finished_are_removed_in_time(setup: RunnerSetup, tmp_path: Path):
    abandoned = keep(tmp_path, "c.partial", 100, used_s=1_000)
    fresh = keep(tmp_path, "d.partial", 100, used_s=4_000_000_000)
    assert file_for(setup) is not None
    assert not abandoned.exists()
    assert fresh.exists()


def test_a_folder_that_cannot_be_made_keeps_nothing(setup: RunnerSetup, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    assert file_for(replace(setup, cache_folder=tmp_path / "file")) is None


@pytest.mark.parametrize("value", [-1, 1.5, "all"])
def test_another_bound_than_a_number_of_bytes_is_refused(value: Any):
    with pytest.raises(ConfigError, match="--weight-cache-bytes"):
        EngineConfig(weight_cache_bytes=value)


@pytest.mark.native
def test_a_later_start_reads_what_the_first_kept_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Large enough to be kept only by its vocabulary."""
    shape = replace(
        open_checkpoint(None).config, num_layers=1, layer_pattern=(LayerKind(),), vocab_size=260_000
    )
    model = tmp_path / "model"
    write_random_checkpoint(shape, model, seed=0, dtype="bfloat16")
    copy(open_checkpoint(None).folder / "tokenizer.json", model)
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path / "cache"))

    def answer(**options: Any) -> tuple[object, ...]:
        with LLM(model, quantization="int8", max_model_len=64, num_pages=64, **options) as llm:
            (output,) = llm.generate([5, 6, 7], PARAMS)
        (sample,) = output.outputs
        return sample.token_ids, sample.logprobs

    def files() -> dict[str, int]:
        return {each.name: each.stat().st_ino for each in tmp_path.glob("cache/weights/*")}

    plain = answer(weight_cache_bytes=0)
    assert not files()
    assert answer() == plain
    kept = files()
    assert len(kept) == 1
    assert answer() == plain
    assert files() == kept
