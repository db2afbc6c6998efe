"""Drafts of a model's MTP layer in its engine: the streams keep their bits, and right drafts stay.

Random weights show the first. For the second, the next token of `predictable` models follows from
the last one alone, and their MTP layer finds the one after it from the hidden state alone: each
draft stays, unless it came from another hidden state. Both are a MiMo, and a model of each other
layout.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.opening import open_bundled_draft, open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import plan_model
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig, parse_speculative_config
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.test_draft_models import Warm, play, varied, warm

pytestmark = pytest.mark.native

MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
VOCAB_SIZE = 64
INPUT_LINEARS = ("input_proj.weight", ".fc.weight", ".eh_proj.weight")
SHIFT = 11  # in the predictable model each token is followed by the one that is so much larger


SHAPES = {
    "mimo": named_shape("tiny-mimo"),
    "qwen": replace(named_shape("tiny-qwen3"), num_mtp_layers=1, mtp_layout=QWEN_MTP),
    "deepseek": replace(named_shape("tiny-qwen3-moe"), num_mtp_layers=1, mtp_layout=DEEPSEEK_MTP),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def folder_of(name: str) -> Path:
        if not (root / name).exists():
            write_random_checkpoint(SHAPES[name], root / name, seed=3, dtype="float32")
        return root / name

    return folder_of


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictable("mimo", tmp_path_factory.mktemp("models") / "predictable")


@pytest.fixture(scope="module")
def runners(predictable: Path) -> Iterator[tuple[Warm, Warm]]:
    with warm(predictable, None) as plain, warm(predictable, MTP) as drafting:
        yield plain, drafting


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
    unit = np.eye(VOCAB_SIZE, dtype=np.float32)
    follows = np.roll(unit, SHIFT, axis=0)  # [following token, token]
    if "o_proj" in name or "down_proj" in name:
        return np.zeros_like(found)
    if "embed_tokens" in name:
        return unit
    if "lm_head" in name:
        return np.ascontiguousarray(8 * follows)
    if name.endswith(INPUT_LINEARS):
        halves = [follows, np.zeros_like(unit)]
        return np.concatenate(halves if "input_proj" in name else halves[::-1], axis=1)
    return np.ones_like(found) if "norm" in name else found


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(shape, options, id=f"{shape}-{name}", marks=() if by_day else pytest.mark.soak)
        for shape in SHAPES
        for name, options, by_day in (
            ("plain", {}, False),
            (
                "int8",
                {"kv_cache_dtype": "int8", "dtype": "bfloat16", "quantization": "int8"},
                shape == "mimo",
            ),
            ("dense", {"kv_layout": "dense"}, False),
        )
    ],
)
def test_drafts_of_the_mtp_layer_change_no_bit(
    folders: Callable[[str], Path], shape: str, options: dict[str, object]
):
    """In an ample pool and, if a row does not have its own place, in one that is too small."""
    requests = varied(331)
    pools: list[dict[str, Any]] = [{}, {"num_pages": 7, "enable_prefix_caching": False}]
    if "kv_layout" in options:
        del pools[1]
    with warm(folders(shape), None, **options) as runners:
        plain = [runners.play(requests, **pool) for pool in pools]
    with warm(folders(shape), MTP, **options) as runners:
        drafted = [runners.play(requests, **pool) for pool in pools]
    for pool, (streams, _, num_preemptions), (same, counts, _) in zip(
        pools, plain, drafted, strict=True
    ):
        assert same == streams
        assert counts.num_draft_tokens > 100
        assert counts.num_accepted_tokens < counts.num_draft_tokens
        assert (num_preemptions > 0) == ("num_pages" in pool)


def following(prompt_sizes: tuple[int, ...], **options: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **options})
    return [
        Request(
            prompt_token_ids=tuple(place * SHIFT % VOCAB_SIZE for place in range(size)),
            params=params,
        )
        for size in prompt_sizes
    ]


def check_right_drafts(
    plain: Warm, drafting: Warm, requests: list[Request], **options: Any
) -> None:
    streams, _, _ = plain.play(requests, **options)
    drafted, counts, num_preemptions = drafting.play(requests, **options)
    assert drafted == streams
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 24
    assert (num_preemptions > 0) == ("num_pages" in options)


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (following((5, 1, 2)), {}),
        (following((40, 40, 37)), {"one_by_one": True}),
        (following((20, 33), n=3, temperature=0.7, seed=1), {}),
        (following((20, 30, 33)), {"num_pages": 7, "enable_prefix_caching": False}),
        (following((60, 35)), {"max_num_batched_tokens": 16}),
    ],
    ids=["short", "cached prefix", "samples", "preemption", "small steps"],
)
def test_right_drafts_stay(
    runners: tuple[Warm, Warm], requests: list[Request], options: dict[str, Any]
):
    check_right_drafts(*runners, requests, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen", {"dtype": "bfloat16", "quantization": "int8"}),
        ("deepseek", {"dtype": "bfloat16"}),
        ("mimo", {"quantization": "int8"}),
        ("qwen", {}),
    ],
    ids=["qwen, int8", "deepseek", "mimo, int8", "qwen"],
)
@pytest.mark.soak
def test_right_drafts_of_other_layouts_and_types_stay(
    shape: str, options: dict[str, Any], tmp_path: Path
):
    """Behind a prefix from the cache, and of several samples of a prompt. The negative control:
    with the halves of the input's linear swapped, no draft stays."""
    folder = make_predictable(shape, tmp_path / "predictable")
    known = following((40, 1, 37))
    with warm(folder, None, **options) as plain, warm(folder, MTP, **options) as drafting:
        check_right_drafts(plain, drafting, known, one_by_one=True)
        check_right_drafts(plain, drafting, following((20, 33), n=2, temperature=0.7, seed=1))
    swap_halves(folder / "model.safetensors")
    _, counts, _ = play(folder, known, MTP, **options)
    assert counts.num_draft_tokens > counts.num_accepted_tokens == 0


def swap_halves(file: Path) -> None:
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(INPUT_LINEARS))
    save_file({**tensors, name: np.roll(tensors[name], VOCAB_SIZE, axis=1)}, file)


def test_a_model_without_mtp_layers_is_refused():
    config = EngineConfig(speculative_config=MTP)
    with pytest.raises(CheckpointError, match=r"the method mtp of --speculative-config: .*no MTP"):
        plan_model(open_bundled_draft(open_checkpoint(None)), config)


def test_operations_that_keep_no_hidden_states_are_refused(folders: Callable[[str], Path]):
    """Those of the reference table: with hidden states XLA makes another program of them."""
    config = EngineConfig(speculative_config=MTP, ops="reference")
    with pytest.raises(ConfigError, match="xla:cpu with reference ops does not keep"):
        plan_model(open_checkpoint(folders("mimo")), config)


def test_the_plan_counts_the_memory_of_the_layer_and_of_hidden_states(
    folders: Callable[[str], Path],
):
    folder = folders("mimo")
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
