"""What the lack of a key means: the family's value, or a refusal that names it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.gguf.config import architectures
from cadenza.checkpoint.gguf.files import open_gguf_files
from cadenza.checkpoint.gguf.model import read_model
from cadenza.checkpoint.gguf.reader import GGUFFile
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import LinearRopeScaling, LongRopeScaling, YarnRopeScaling
from tests.checkpoint.gguf_models import (
    ARCHITECTURES,
    GEMMAS_4,
    HYBRIDS,
    SEEING,
    Conversion,
    convert,
)

Holds = Callable[[ModelConfig], bool]
SHAPES = {**ARCHITECTURES, **HYBRIDS, **GEMMAS_4, **SEEING}


@dataclass(frozen=True, slots=True)
class Stored:
    """A model's file, and its metadata."""

    architecture: str
    file: GGUFFile
    keys: tuple[str, ...]

    def without(self, *keys: str) -> tuple[ModelConfig, Any]:
        return self.having({f"{self.architecture}.{key}": None for key in keys})

    def having(self, values: dict[str, Any]) -> tuple[ModelConfig, Any]:
        """The model of a file whose metadata have these values, of which None is no key."""
        header = self.file.header
        changed = {**header.metadata.values, **values}
        kept = {key: value for key, value in changed.items() if value is not None}
        metadata = JsonObject(kept, header.metadata.where)
        return read_model((replace(self.file, header=replace(header, metadata=metadata)),))


@pytest.fixture(scope="module", params=SHAPES)
def stored(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return stored_as(request.param, tmp_path_factory.mktemp("gguf"))


def stored_as(shape: str, folder: Path) -> Stored:
    model: Conversion = convert(shape, folder / "original")
    (file,) = open_gguf_files(model.write(folder / "model.gguf"))
    return Stored(model.architecture, file, tuple(model.metadata))


def window_is(*wanted: int | None) -> Holds:
    return lambda config: {kind.window for kind in config.layer_kinds} == set(wanted)


def original_is(length: int | None) -> Holds:
    def holds(config: ModelConfig) -> bool:
        scaling = config.rope.scaling
        assert isinstance(scaling, YarnRopeScaling | LongRopeScaling)
        wanted = config.max_position_embeddings if length is None else length
        return scaling.original_max_position_embeddings == wanted

    return holds


_ORIGINAL = "rope.scaling.original_context_length"
TAKEN: dict[tuple[str, str], Holds] = {
    ("llama", "attention.sliding_window"): window_is(None),
    ("llama", "rope.scaling.type"): lambda c: isinstance(c.rope.scaling, LinearRopeScaling),
    ("llama", _ORIGINAL): original_is(None),
    ("mistral3", _ORIGINAL): original_is(16_384),
    ("gemma2", "attention.sliding_window"): window_is(4096, None),
    ("gemma2", "attn_logit_softcapping"): lambda c: c.attention_soft_cap == 50.0,
    ("gemma2", "final_logit_softcapping"): lambda c: c.logit_soft_cap == 30.0,
    ("gemma3", "attention.sliding_window_pattern"): window_is(39),  # every sixth is full
    ("gemma4", "final_logit_softcapping"): lambda c: c.logit_soft_cap is None,
    ("phi3", _ORIGINAL): original_is(4096),
    ("phi3", "rope.scaling.attn_factor"): lambda c: (
        isinstance(c.rope.scaling, LongRopeScaling)
        and c.rope.scaling.attention_factor == pytest.approx(math.sqrt(1 + 7 / 5))
    ),  # by the logarithms of the lengths, 2^12 and 2^5
    ("gpt-oss", "attention.sliding_window"): window_is(128, None),
    ("gpt-oss", _ORIGINAL): original_is(4096),
}
"""What is not the file's, whose shape has values of its own."""


def test_a_key_that_a_file_lacks_has_the_familys_value_or_is_refused_by_its_name(
    stored: Stored,
) -> None:
    whole, _ = stored.without()
    for key in stored.keys:
        full = f"{stored.architecture}.{key}"
        found = told(stored, key)
        if isinstance(found, str):
            assert full in found
            assert "model.gguf" in found
        elif found != whole:
            assert TAKEN[stored.architecture, key](found), full


def told(stored: Stored, key: str) -> ModelConfig | str:
    """The config of a file without a key, or why it is refused."""
    try:
        return stored.without(key)[0]
    except CheckpointError as error:
        return str(error)


def test_each_architecture_has_a_file_here() -> None:
    assert set(SHAPES.values()) == set(architectures())


def test_gpt_oss_without_a_scaling_has_that_of_its_family(tmp_path: Path) -> None:
    stored = stored_as("gpt-oss", tmp_path)
    keys = [key for key in stored.keys if key.startswith("rope.scaling.")]
    config, _ = stored.without(*keys)
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings) == (32.0, 4096)
    assert not scaling.truncate


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "granite",
        {"granite.rope.scaling.finetuned": False},
        r"finetuned is False; it must be absent",
    ),
    (
        "mistral",
        {"llama.rope.scaling.attn_factor": 1.25},
        r"llama\.rope\.scaling\.attn_factor is 1\.25; it must be 1 without rope_factors_long",
    ),
    ("qwen3-moe", {"qwen3moe.expert_gating_func": 2}, r"expert_gating_func is 2; .* 1 \(softmax\)"),
    ("lfm2-moe", {"lfm2moe.expert_gating_func": 1}, r"expert_gating_func is 1; .* 2 \(sigmoid\)"),
    (
        "deepseek-v3",
        {"deepseek2.expert_group_used_count": 9},
        r"deepseek2\.expert_group_used_count is 9; it must be a whole number from 0 to 4",
    ),
    (
        "qwen3.5",
        {"qwen35.ssm.group_count": 3},
        r"linear_num_key_heads 3.*\(qwen35.ssm.group_count, qwen35.ssm.time_step_rank\)",
    ),
]


@pytest.mark.parametrize(("shape", "values", "message"), REFUSED)
def test_a_value_that_is_refused_is_named_as_in_the_file(
    tmp_path: Path, shape: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        stored_as(shape, tmp_path).having(values)
