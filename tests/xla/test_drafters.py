"""Second models and MTP layers in an engine: the streams keep their bits, and right drafts stay.

Random weights show the first. For the second, the next token of `predictable` models follows from
the last one alone, and their MTP layer finds the one after it from the hidden state alone: each
draft stays, unless it came from another hidden state. Both are a MiMo, and a model of each other
layout.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
from cadenza.speculative_config import SpeculativeConfig
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.warm_runners import Played, WarmRunners, warm_runners

COPY = SpeculativeConfig(method="quantised", num_speculative_tokens=4)
Streams = dict[tuple[int, int], list[object]]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    made: dict[tuple[str, int], Path] = {}

    def make(shape: str, seed: int) -> Path:
        if (shape, seed) not in made:
            folder = made[shape, seed] = tmp_path_factory.mktemp("models") / f"{shape}-{seed}"
            write_random_checkpoint(named_shape(shape), folder, seed=seed, dtype="float32")
        return made[shape, seed]

    return make


def warm(
    folder: Path | None, speculation: SpeculativeConfig | None, **options: Any
) -> AbstractContextManager[WarmRunners]:
    sizes = {"max_num_seqs": 3, "max_model_len": 96, "max_num_batched_tokens": 24, **options}
    return warm_runners(folder, speculation, **sizes)


def play(
    folder: Path | None,
    requests: list[Request],
    speculation: SpeculativeConfig | None,
    **options: Any,
) -> Played:
    with warm(folder, speculation, **options) as runners:
        return runners.play(requests)


def varied(vocab_size: int) -> list[Request]:
    shared = tuple(place * 7 % vocab_size for place in range(33))
    options: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "n": 2},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "logit_bias": {5: 2.0}},
        {"temperature": 0.0, "stop_token_ids": (7, 21, 90), "min_tokens": 3},
        {"temperature": 1.0, "speculative": False, "prompt_logprobs": 1},
    ]
    return [
        Request(
            prompt_token_ids=(*shared[: (5, 33, 33, 20, 33, 9)[index]], index + 1),
            params=SamplingParams(
                **{"max_tokens": 30, "seed": index, "logprobs": 2, "ignore_eos": True, **each}  # type: ignore[arg-type]
            ),
        )
        for index, each in enumerate(options)
    ]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param("tiny-llama", {}, marks=pytest.mark.soak),
        ("tiny-gemma3", {"kv_cache_dtype": "int8"}),
        pytest.param("tiny-llama", {"ops": "reference"}, marks=pytest.mark.soak),
    ],
    ids=["plain", "int8 kv, windows", "reference ops"],
)
def test_drafts_of_a_second_model_change_no_bit(
    make_folder: Callable[[str, int], Path], shape: str, options: dict[str, object]
) -> None:
    folder, draft = make_folder(shape, 1), make_folder("tiny-mixtral", 2)
    config = SpeculativeConfig(method="draft_model", model=str(draft), num_speculative_tokens=3)
    requests = varied(331)
    small: dict[str, Any] = {"num_pages": 7, "enable_prefix_caching": False}
    with warm(folder, None, **options) as runners:
        plain = runners.play(requests)
        plain_small = runners.play(requests, **small)
    assert plain.num_preemptions == 0 < plain_small.num_preemptions
    for speculation in (config, COPY):
        with warm(folder, speculation, **options) as runners:
            drafted = [runners.play(requests), runners.play(requests, **small)]
        assert [each.streams for each in drafted] == [plain.streams, plain_small.streams]
        assert min(each.counts.num_draft_tokens for each in drafted) > 100
    assert min(each.counts.num_accepted_tokens for each in drafted) > 0


def test_most_drafts_of_the_bundled_models_copy_are_accepted() -> None:
    one = replace(COPY, num_speculative_tokens=1)
    prompts = [tuple(range(300 + 40 * index, 312 + 40 * index)) for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    requests = [Request(prompt_token_ids=prompt, params=params) for prompt in prompts]
    streams, counts, *_ = play(None, requests, one)
    assert streams == play(None, requests, None).streams
    assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens > 100


def test_a_model_that_drafts_for_itself_is_always_accepted(
    make_folder: Callable[[str, int], Path],
) -> None:
    folder = make_folder("tiny-llama", 1)
    itself = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)
    requests = [each for each in varied(331) if not each.params.stop_token_ids]
    counts = play(folder, requests, itself).counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 80


def test_a_draft_model_of_another_vocabulary_is_refused(
    make_folder: Callable[[str, int], Path],
) -> None:
    folder, other = make_folder("tiny-llama", 1), make_folder("tiny-qwen3", 1)
    config = EngineConfig(
        speculative_config=SpeculativeConfig(method="draft_model", model=str(other))
    )
    with pytest.raises(ConfigError, match=r"vocabulary of 1003 tokens.* one of 331"):
        plan_model(open_checkpoint(folder), config)


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    bundled = open_checkpoint(None)
    folder = shutil.copytree(bundled.folder, tmp_path / "swapped")
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    entries = told["model"]["vocab"]
    first, second = list(entries)[-2:]
    entries[first], entries[second] = entries[second], entries[first]
    file.write_text(json.dumps(told))
    swapped = SpeculativeConfig(method="draft_model", model=str(folder))
    with pytest.raises(ConfigError, match=r"another vocabulary .* the token"):
        plan_model(bundled, EngineConfig(speculative_config=swapped))


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = SpeculativeConfig(method="draft_model", model=str(tmp_path / "none"))
    config = EngineConfig(speculative_config=missing)
    with pytest.raises(CheckpointError, match=r"the draft model of --speculative-config: .*none"):
        plan_model(open_checkpoint(None), config)


@pytest.mark.parametrize(("own", "draft"), [("int4", "int4"), ("int4", "int8"), ("int8", "int8")])
def test_a_copy_that_is_no_coarser_than_the_model_is_refused(own: str, draft: str) -> None:
    copy = SpeculativeConfig(method="quantised", quantization=draft)  # type: ignore[arg-type]
    config = EngineConfig(quantization=own, speculative_config=copy)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{draft} is no coarser than the model in {own}"):
        plan_model(open_checkpoint(None), config)


def test_the_plan_counts_the_memory_of_a_draft_model() -> None:
    bundled = open_checkpoint(None)
    size = {"max_model_len": 256, "max_num_seqs": 4}
    plain = plan_model(bundled, EngineConfig(**size))
    copy = plan_model(bundled, EngineConfig(speculative_config=COPY, **size))
    assert copy.draft is not None
    assert 0 < copy.draft.weight_bytes + copy.kv_bytes_beside(copy.draft) < plain.weight_bytes / 2
    itself = SpeculativeConfig(method="draft_model", model=str(bundled.folder))
    full = plan_model(bundled, EngineConfig(speculative_config=itself, **size))
    assert full.draft is not None
    assert full.draft.weight_bytes == plain.weight_bytes
    assert full.kv_bytes_beside(full.draft) == plain.kv_bytes
    for plan in (copy, full):
        assert (plan.weight_bytes, plan.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)
        assert "drafts by" in plan.summary


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
def runners(predictable: Path) -> Iterator[tuple[WarmRunners, WarmRunners]]:
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
@pytest.mark.native
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
    for pool, without, with_drafts in zip(pools, plain, drafted, strict=True):
        assert with_drafts.streams == without.streams
        assert with_drafts.counts.num_draft_tokens > 100
        assert with_drafts.counts.num_accepted_tokens < with_drafts.counts.num_draft_tokens
        assert (without.num_preemptions > 0) == ("num_pages" in pool)


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
    plain: WarmRunners, drafting: WarmRunners, requests: list[Request], **options: Any
) -> None:
    drafted = drafting.play(requests, **options)
    assert drafted.streams == plain.play(requests, **options).streams
    assert drafted.counts.num_accepted_tokens == drafted.counts.num_draft_tokens > 24
    assert (drafted.num_preemptions > 0) == ("num_pages" in options)


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
@pytest.mark.native
def test_right_drafts_stay(
    runners: tuple[WarmRunners, WarmRunners], requests: list[Request], options: dict[str, Any]
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
@pytest.mark.native
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
    counts = play(folder, known, MTP, **options).counts
    assert counts.num_draft_tokens > counts.num_accepted_tokens == 0


def swap_halves(file: Path) -> None:
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(INPUT_LINEARS))
    save_file({**tensors, name: np.roll(tensors[name], VOCAB_SIZE, axis=1)}, file)


@pytest.mark.native
def test_a_model_without_mtp_layers_is_refused():
    config = EngineConfig(speculative_config=MTP)
    with pytest.raises(CheckpointError, match=r"the method mtp of --speculative-config: .*no MTP"):
        plan_model(open_bundled_draft(open_checkpoint(None)), config)


@pytest.mark.native
def test_operations_that_keep_no_hidden_states_are_refused(folders: Callable[[str], Path]):
    """Those of the reference table: with hidden states XLA makes another program of them."""
    config = EngineConfig(speculative_config=MTP, ops="reference")
    with pytest.raises(ConfigError, match="xla:cpu with reference ops does not keep"):
        plan_model(open_checkpoint(folders("mimo")), config)


@pytest.mark.native
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
