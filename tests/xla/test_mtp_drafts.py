"""Drafts of a model's MTP layer in its engine: the streams keep their bits, and right drafts stay.

Random weights show the first. For the second, the next token of `predictable` models follows from
the last one alone, and their MTP layer finds the one after it from the hidden state alone: each
draft stays, unless it came from another hidden state. Both are a MiMo, and a model of each other
layout.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint import open_bundled_draft, open_checkpoint
from cadenza.checkpoint.mtp_layout import DEEPSEEK_MTP, QWEN_MTP
from cadenza.checkpoint.random_checkpoint import named_shape, write_random_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import plan_model
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig, parse_speculative_config
from tests.xla.test_draft_models import play, varied

pytestmark = pytest.mark.native

MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
VOCAB_SIZE = 64
SHIFT = 11
"""In the predictable model each token is followed by the one that is so much larger."""


SHAPES = {
    "mimo": named_shape("tiny-mimo"),
    "qwen": replace(named_shape("tiny-qwen3"), num_mtp_layers=1, mtp_layout=QWEN_MTP),
    "deepseek": replace(named_shape("tiny-qwen3-moe"), num_mtp_layers=1, mtp_layout=DEEPSEEK_MTP),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "mimo"
    write_random_checkpoint(SHAPES["mimo"], made, seed=3, dtype="float32")
    return made


@pytest.fixture(
    scope="module", params=["mimo", "qwen", pytest.param("deepseek", marks=pytest.mark.soak)]
)
def any_folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / request.param
    write_random_checkpoint(SHAPES[request.param], made, seed=3, dtype="float32")
    return made


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictable("mimo", tmp_path_factory.mktemp("models") / "predictable")


@pytest.fixture(scope="module", params=[name for name in SHAPES if name != "mimo"])
def other_predictable(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictable(request.param, tmp_path_factory.mktemp("models") / "predictable")


def make_predictable(name: str, made: Path) -> Path:
    shape = replace(
        SHAPES[name],
        tie_word_embeddings=False,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        hidden_size=VOCAB_SIZE,
        num_heads=2,
        num_kv_heads=1,
    )
    write_random_checkpoint(shape, made, seed=3, dtype="float32")
    file = made / "model.safetensors"
    tensors = {name: predictable_weight(name, each) for name, each in load_file(file).items()}
    save_file(tensors, file)
    return made


def predictable_weight(name: str, found: np.ndarray) -> np.ndarray:
    """Of one-hot hidden states, to which attention and MLPs add nothing."""
    unit = np.eye(VOCAB_SIZE, dtype=np.float32)
    follows = np.roll(unit, SHIFT, axis=0)  # [following token, token]
    if "o_proj" in name or "down_proj" in name:
        return np.zeros_like(found)
    if "embed_tokens" in name:
        return unit
    if "lm_head" in name:
        return np.ascontiguousarray(8 * follows)
    if "input_proj" in name:
        return np.concatenate([follows, np.zeros_like(unit)], axis=1)
    if name.endswith((".fc.weight", ".eh_proj.weight")):
        return np.concatenate([np.zeros_like(unit), follows], axis=1)
    return np.ones_like(found) if "norm" in name else found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8", "dtype": "bfloat16", "quantization": "int8"},
        {"num_pages": 7, "enable_prefix_caching": False},
        {"kv_layout": "dense"},
    ],
    ids=["plain", "int8", "preemption", "dense"],
)
def test_drafts_of_the_mtp_layer_change_no_bit(any_folder: Path, options: dict[str, object]):
    requests = varied(331)
    plain, _, num_preemptions = play(any_folder, requests, None, **options)
    drafted, counts, _ = play(any_folder, requests, MTP, **options)
    assert drafted == plain
    assert counts.num_draft_tokens > 100
    assert counts.num_accepted_tokens < counts.num_draft_tokens
    assert (num_preemptions > 0) == ("num_pages" in options)


def following(prompt_sizes: tuple[int, ...], **options: Any) -> list[Request]:
    """Prompts in the order in which the predictable model goes on."""
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **options})
    return [
        Request(
            prompt_token_ids=tuple(place * SHIFT % VOCAB_SIZE for place in range(size)),
            params=params,
        )
        for size in prompt_sizes
    ]


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (following((5, 1, 2)), {}),
        (following((40, 40, 37)), {"max_num_seqs": 1}),
        (following((20, 33), n=3, temperature=0.7, seed=1), {}),
        (following((20, 30, 33)), {"num_pages": 7, "enable_prefix_caching": False}),
        (following((20, 5)), {"dtype": "bfloat16", "quantization": "int8"}),
        (following((60, 35)), {"max_num_batched_tokens": 16}),
    ],
    ids=["short", "cached prefix", "samples", "preemption", "int8", "small steps"],
)
def test_right_drafts_stay(predictable: Path, requests: list[Request], options: dict[str, Any]):
    plain, _, _ = play(predictable, requests, None, **options)
    drafted, counts, num_preemptions = play(predictable, requests, MTP, **options)
    assert drafted == plain
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 24
    assert (num_preemptions > 0) == ("num_pages" in options)


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (following((40, 1, 37)), {"max_num_seqs": 2}),
        (following((20, 33), n=2, temperature=0.7, seed=1), {"dtype": "bfloat16"}),
    ],
    ids=["cached prefix", "samples"],
)
def test_right_drafts_of_other_layouts_stay(
    other_predictable: Path, requests: list[Request], options: dict[str, Any]
):
    plain, _, _ = play(other_predictable, requests, None, **options)
    drafted, counts, _ = play(other_predictable, requests, MTP, **options)
    assert drafted == plain
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 24


def test_drafts_from_swapped_inputs_would_be_noticed(other_predictable: Path, tmp_path: Path):
    """The negative control: with the halves of the input's linear swapped, no draft stays."""
    shutil.copytree(other_predictable, tmp_path / "swapped")
    file = tmp_path / "swapped" / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(("fc.weight", "eh_proj.weight")))
    save_file({**tensors, name: np.roll(tensors[name], VOCAB_SIZE, axis=1)}, file)
    _, counts, _ = play(tmp_path / "swapped", following((40, 1, 37)), MTP)
    assert counts.num_draft_tokens > counts.num_accepted_tokens == 0


def test_a_model_without_mtp_layers_is_refused():
    config = EngineConfig(speculative_config=MTP)
    with pytest.raises(CheckpointError, match=r"the method mtp of --speculative-config: .*no MTP"):
        plan_model(open_bundled_draft(open_checkpoint(None)), config)


def test_operations_that_keep_no_hidden_states_are_refused(folder: Path):
    """Those of the reference table: with hidden states XLA makes another program of them."""
    config = EngineConfig(speculative_config=MTP, ops="reference")
    with pytest.raises(ConfigError, match="xla:cpu with reference ops does not keep"):
        plan_model(open_checkpoint(folder), config)


def test_the_plan_counts_the_memory_of_the_layer_and_of_hidden_states(folder: Path):
    checkpoint, size = open_checkpoint(folder), {"max_model_len": 256, "max_num_seqs": 4}
    plain = plan_model(checkpoint, EngineConfig(**size))  # type: ignore[arg-type]
    plan = plan_model(checkpoint, EngineConfig(speculative_config=MTP, **size))  # type: ignore[arg-type]
    assert plan.draft is not None
    sizes = json.loads((folder / "config.json").read_text())
    assert plan.draft.kv_bytes_per_token == 4 * (2 * 2 * 32 + sizes["hidden_size"])
    assert 0 < plan.draft.weight_bytes < plain.weight_bytes / 2
    assert (plan.weight_bytes, plan.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)
    assert "drafts by its MTP layer" in plan.summary


@pytest.mark.parametrize("name", ["mtp", "mimo_mtp"])
def test_both_of_vllms_names_are_taken(name: str):
    assert parse_speculative_config({"method": name, "num_speculative_tokens": 3}) == MTP


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "deepseek_mtp"}, "is not one of ngram, draft_model, quantised, mtp"),
        ({"method": "mtp", "model": "small"}, "a model is only for the method draft_model"),
        ({"method": "mtp", "quantization": "int8"}, "leave it out with mtp"),
    ],
)
def test_what_the_method_does_not_take_is_refused(options: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        parse_speculative_config(options)
