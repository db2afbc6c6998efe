"""A second model on the XLA runner: the streams have the bits that they have without it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig
from cadenza.drafting.drafts import DraftCounts
from cadenza.engine.core import EngineCore
from cadenza.errors import CheckpointError, ConfigError
from cadenza.events import Finished, Token
from cadenza.loading.build import plan_model
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.warm_runners import WarmRunners, warm_runners

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


@dataclass(frozen=True, slots=True)
class Warm:
    runners: WarmRunners

    def play(
        self, requests: list[Request], *, one_by_one: bool = False, **limits: Any
    ) -> tuple[Streams, DraftCounts, int]:
        """Everything that is told of each stream, the drafts, and the number of preemptions.

        `limits` are those of `WarmRunners.new_core`; `one_by_one`, no two requests are in the
        engine together.
        """
        core = self.runners.new_core(**limits)
        streams: Streams = {}
        for request in requests:
            core.submit(request)
            if one_by_one:
                drain(core, streams)
        drain(core, streams)
        scheduler = core.scheduler
        return streams, core.draft_counts, scheduler.num_preemptions


def drain(core: EngineCore, streams: Streams) -> None:
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, Token):
                told: object = (event.token_id, event.logprobs)
            elif isinstance(event, Finished):
                told = (event.finish_reason, event.num_generated_tokens)
            else:
                continue
            streams.setdefault((event.request_id, event.sample), []).append(told)
        core.check_invariants()


@contextmanager
def warm(
    folder: Path | None, speculation: SpeculativeConfig | None, **options: Any
) -> Iterator[Warm]:
    sizes = {"max_num_seqs": 3, "max_model_len": 96, "max_num_batched_tokens": 24, **options}
    with warm_runners(folder, speculation, **sizes) as runners:
        yield Warm(runners)


def play(
    folder: Path | None,
    requests: list[Request],
    speculation: SpeculativeConfig | None,
    **options: Any,
) -> tuple[Streams, DraftCounts, int]:
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
        plain, _, num_preemptions = runners.play(requests)
        plain_small, _, num_preemptions_small = runners.play(requests, **small)
    assert num_preemptions == 0 < num_preemptions_small
    for speculation in (config, COPY):
        with warm(folder, speculation, **options) as runners:
            drafted, counts, _ = runners.play(requests)
            drafted_small, counts_small, _ = runners.play(requests, **small)
        assert drafted == plain
        assert drafted_small == plain_small
        assert min(counts.num_draft_tokens, counts_small.num_draft_tokens) > 100
    assert min(counts.num_accepted_tokens, counts_small.num_accepted_tokens) > 0


def test_most_drafts_of_the_bundled_models_copy_are_accepted() -> None:
    one = replace(COPY, num_speculative_tokens=1)
    prompts = [tuple(range(300 + 40 * index, 312 + 40 * index)) for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    requests = [Request(prompt_token_ids=prompt, params=params) for prompt in prompts]
    streams, counts, _ = play(None, requests, one)
    assert streams == play(None, requests, None)[0]
    assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens > 100


def test_a_model_that_drafts_for_itself_is_always_accepted(
    make_folder: Callable[[str, int], Path],
) -> None:
    folder = make_folder("tiny-llama", 1)
    itself = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)
    requests = [each for each in varied(331) if not each.params.stop_token_ids]
    _, counts, _ = play(folder, requests, itself)
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
