"""`--prefix-cache-disk` as users see it: `LLM` and `cadenza serve` after a restart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.plan import make_plan
from cadenza.outputs import RequestOutput
from tests.by_day import by_day
from tests.engine.stored import files_of
from tests.engine.test_plan import TRAITS
from tests.server.serve_process import ServeProcess, serve_process

STORY = "Once upon a time a fox and a crow lived in a small house by the river. " * 4
PARAMS = SamplingParams(
    temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, logprobs=3, repetition_penalty=1.3
)


LIMITS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 512, "max_num_batched_tokens": 64}


def ask(folder: Path, model: Path | None = None, **options: Any) -> RequestOutput:
    with LLM(model, prefix_cache_disk=str(folder), **{**LIMITS, **options}) as llm:
        (output,) = llm.generate(STORY, PARAMS)
    return output


def stream_of(output: RequestOutput) -> tuple[object, ...]:
    (sample,) = output.outputs
    return sample.token_ids, sample.logprobs, sample.text


KINDS = {
    "native bfloat16": {"dtype": "bfloat16"},
    "native int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "native float32, larger pages": {"dtype": "float32", "page_size": 32},
}


@pytest.mark.native
@pytest.mark.parametrize("kind", by_day(KINDS, {"native int8 KV"}))
def test_a_later_start_takes_the_prompt_and_gives_the_same_bits(kind: str, tmp_path: Path):
    options: dict[str, Any] = KINDS[kind]
    cold, stored = ask(tmp_path, **options), ask(tmp_path, **options)
    assert stream_of(stored) == stream_of(cold)
    assert cold.num_cached_tokens == 0
    page_size = options.get("page_size", 16)
    num_tokens = len(cold.prompt_token_ids or ())
    assert stored.num_cached_tokens == (num_tokens - 1) // page_size * page_size
    assert len(files_of(tmp_path)) == num_tokens // page_size


@pytest.mark.soak
def test_the_reference_operations_store_pages_too(tmp_path: Path, worded_folder: Path):
    options = {"model": worded_folder, "ops": "reference", "max_num_seqs": 1, "num_pages": 40}
    cold = ask(tmp_path, **options)
    stored = ask(tmp_path, **options, max_num_queued_reqs=7)
    assert stream_of(stored) == stream_of(cold)
    assert (stored.num_cached_tokens or 0) > 0
    larger = ask(tmp_path, **{**options, "num_pages": 48})
    assert stream_of(larger) == stream_of(cold), "a pool's size decides no bits"
    assert larger.num_cached_tokens == stored.num_cached_tokens
    assert ask(tmp_path, **{**options, "max_num_batched_tokens": 32}).num_cached_tokens == 0


@pytest.mark.native
@pytest.mark.soak
def test_an_engine_that_computes_other_bits_takes_nothing(tmp_path: Path):
    ask(tmp_path, dtype="bfloat16")
    for other in (
        {"dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"page_size": 32},
        {"quantization": "int8"},
    ):
        assert ask(tmp_path, **{"dtype": "bfloat16", **other}).num_cached_tokens == 0, other


def test_pages_of_another_revision_of_the_arithmetic_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ask(tmp_path)
    monkeypatch.setattr("cadenza.loading.identity.ARITHMETIC_REVISION", 0)
    assert ask(tmp_path).num_cached_tokens == 0
    assert (ask(tmp_path).num_cached_tokens or 0) > 0


def usage(serving: ServeProcess) -> tuple[str, int]:
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = serving.post("/v1/completions", body).json()
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], details["cached_tokens"]


def metric(serving: ServeProcess, name: str) -> float:
    lines = serving.get("/metrics").text.splitlines()
    start = f"cadenza:prefix_cache_disk_{name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_a_served_prompt_survives_a_restart(tmp_path: Path):
    limits = ("--max-num-seqs", "2", "--max-model-len", "512", "--max-num-batched-tokens", "64")
    flags = (*limits, "--prefix-cache-disk", tmp_path)
    answers: list[tuple[str, int]] = []
    for _ in range(2):
        with serve_process(*flags) as serving:
            serving.wait_ready()
            answers.append(usage(serving))
            if len(answers) == 1:
                serving.wait_for(lambda: metric(serving, "pages_written_total") >= 4)
                assert metric(serving, "page_bytes_written_total") > 0
                assert metric(serving, "misses_total") == 1
            else:
                assert metric(serving, "pages_read_total") >= 4
                assert metric(serving, "page_bytes_read_total") > 0
            serving.terminate()
            serving.wait()
    (cold, none), (again, cached) = answers
    assert again == cold
    assert none == 0
    assert cached >= 64


BACKEND = replace(TRAITS, capabilities=frozenset({"page_copies"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_prefix_caching": False}, "leave out --no-enable-prefix-caching"),
        ({"kv_layout": "dense"}, "--kv-layout dense"),
        ({"prefix_cache_memory_share": 0}, "holds nothing with --prefix-cache-memory-share 0"),
        ({"prefix_cache_disk": None, "prefix_cache_disk_bytes": 1 << 20}, "without --prefix"),
    ],
    ids=str,
)
def test_a_folder_without_what_it_stores_is_refused(options: dict[str, Any], said: str):
    config = EngineConfig(**{"prefix_cache_disk": "folder", **options})
    with pytest.raises(ConfigError, match=said):
        make_plan(config, open_checkpoint(None), BACKEND, 1 << 34)


def test_a_folder_beside_pages_is_planned():
    config = EngineConfig(prefix_cache_disk="folder")
    assert make_plan(config, open_checkpoint(None), BACKEND, 1 << 34).limits.enable_prefix_caching


def test_a_backend_whose_pages_cannot_be_copied_is_named():
    own = replace(TRAITS, name="mlx:metal", capabilities=frozenset())
    with pytest.raises(ConfigError, match="mlx:metal does not support"):
        make_plan(EngineConfig(prefix_cache_disk="folder"), open_checkpoint(None), own, 1 << 34)
