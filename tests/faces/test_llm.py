"""`LLM`: many prompts at once, streams read in turns, embeddings, prompts' log probabilities;
errors before anything starts."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import (
    LLM,
    AsyncEngine,
    EmbeddingRequestOutput,
    EngineConfig,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)
from cadenza.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineStalledError,
    InvalidRequestError,
)
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import find_checkpoint
from cadenza.verification.reference import build_reference
from tests.checkpoint.files import write_base_model
from tests.faces.conftest import LIMITS

PROMPTS = [[1, 2, 3], [4, 5], [7] * 50, [9], [11] * 20, [12, 13]]


def greedy(max_tokens: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)  # type: ignore[arg-type]


def test_results_come_in_the_prompts_order_and_equal_each_prompt_alone(llm: LLM):
    together = llm.generate(PROMPTS, greedy())
    assert [list(output.prompt_token_ids) for output in together] == PROMPTS
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = llm.generate(prompt, greedy())[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 12


def test_more_prompts_than_the_queue_holds_are_all_answered(llm: LLM):
    prompts = [[1 + index % 300] for index in range(70)]
    outputs = llm.generate(prompts, greedy(3))
    assert [list(output.prompt_token_ids) for output in outputs] == prompts


def test_an_engine_that_computes_nothing_ends_the_call_with_an_error_and_not_the_next_one(llm: LLM):
    """It lacks the pages that somebody holds."""
    pool = llm.core.scheduler.kv_cache.pool
    held = pool.try_allocate(pool.num_available)
    assert held is not None
    try:
        with pytest.raises(EngineStalledError, match="0 running, 2 waiting, 0 of"):
            llm.generate(PROMPTS[:2], greedy())
    finally:
        pool.free(held)
    assert llm.core.is_idle
    assert [len(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, greedy())] == [12] * 6


def test_prompts_wait_for_room_while_another_stream_that_is_half_read_fills_the_queue(llm: LLM):
    (alone,) = llm.generate([5, 6], greedy())
    stream = llm.stream([[1 + index] for index in range(60)], greedy(40), kind="final")
    half_read = [next(stream)]
    assert not llm.core.num_queue_slots
    (beside,) = llm.generate([5, 6], greedy())
    assert beside.outputs == alone.outputs
    assert [len(output.outputs[0].token_ids) for output in [*half_read, *stream]] == [40] * 60


def test_each_prompt_may_have_its_own_params(llm: LLM):
    outputs = llm.generate(PROMPTS[:2], [greedy(3), greedy(5, logprobs=2)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert outputs[0].outputs[0].logprobs is None
    logprobs = outputs[1].outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 5
    assert all(2 <= len(entry) <= 3 for entry in logprobs)
    total = sum(
        entry[token].logprob
        for entry, token in zip(logprobs, outputs[1].outputs[0].token_ids, strict=True)
    )
    assert outputs[1].outputs[0].cumulative_logprob == pytest.approx(total)


def test_two_streams_read_in_turns_are_what_each_is_alone(llm: LLM):
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], greedy())]
    streams = [llm.stream(prompt, greedy()) for prompt in PROMPTS[:2]]
    last = [next(stream) for stream in streams]
    for pair in zip(*streams, strict=False):
        last = list(pair)
    last[1] = [last[1], *streams[1]][-1]
    assert [output.outputs[0].token_ids for output in last] == expected
    assert all(output.finished for output in last)


def test_closing_a_stream_frees_its_request(llm: LLM):
    stream = llm.stream(PROMPTS, greedy(100))
    next(stream)
    assert not llm.core.is_idle
    stream.close()  # type: ignore[attr-defined]
    llm.generate([5], greedy(1))
    counts = llm.core.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)


VARIED = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 30}


def test_a_stop_string_frees_its_request_and_leaves_the_others_as_they_are(worded: LLM):
    params = [{**VARIED, "seed": seed} for seed in range(6)]
    whole = worded.generate(PROMPTS, params)
    stop = whole[2].outputs[0].text[5:9]
    cut = worded.generate(PROMPTS, [*params[:2], {**params[2], "stop": stop}, *params[3:]])
    for index, (one, other) in enumerate(zip(whole, cut, strict=True)):
        if index != 2:
            assert one.outputs == other.outputs
    found = cut[2].outputs[0]
    assert found.text == whole[2].outputs[0].text.split(stop)[0]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    worded.generate([5], {"max_tokens": 1})
    counts = worded.core.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)
    assert worded.core.is_idle


def test_each_sample_ends_at_its_own_stop_string(worded: LLM):
    asked = {**VARIED, "seed": 3, "n": 4}
    (whole,) = worded.generate([PROMPTS[0]], asked)
    stop = whole.outputs[1].text[4:8]
    (cut,) = worded.generate([PROMPTS[0]], {**asked, "stop": stop})
    assert [each.text for each in cut.outputs] == [
        each.text.split(stop)[0] for each in whole.outputs
    ]
    assert cut.outputs[1].stop_reason == stop
    assert cut.finished


def test_deltas_of_a_stream_put_together_are_what_generate_gives(worded: LLM):
    params = [{**VARIED, "seed": seed, "stop": ["e", "0"], "logprobs": 1} for seed in range(6)]
    whole = {output.request_id: output for output in worded.stream(PROMPTS, params, kind="final")}
    texts = dict.fromkeys(range(len(PROMPTS)), "")
    ids: dict[int, tuple[int, ...]] = dict.fromkeys(texts, ())
    first = max(whole) + 1
    for delta in worded.stream(PROMPTS, params, kind="delta"):
        texts[delta.request_id - first] += delta.outputs[0].text
        ids[delta.request_id - first] += delta.outputs[0].token_ids
    expected = [output.outputs[0] for _, output in sorted(whole.items())]
    assert list(texts.values()) == [each.text for each in expected]
    assert list(ids.values()) == [each.token_ids for each in expected]


def test_a_prompt_that_fills_the_context_is_described_when_no_token_is_asked_for(llm: LLM):
    prompt = [1 + index % 50 for index in range(256)]
    none = SamplingParams(max_tokens=0, prompt_logprobs=1)
    one = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (whole,), (shorter,) = llm.generate([prompt], none), llm.generate([prompt[:-1]], one)
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 256
    assert whole.prompt_logprobs[:-1] == shorter.prompt_logprobs
    assert whole.outputs[0].token_ids == ()
    with pytest.raises(InvalidRequestError, match="256 tokens and max_tokens is 1"):
        llm.generate([prompt], one)


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (lambda llm: llm.generate([[1], [331]], greedy()), "331"),
        *(
            (lambda llm, prompt=prompt: llm.generate([prompt], greedy()), "prompt")
            for prompt in ([], [-1], [True], [1.5])
        ),
        (lambda llm: llm.generate("hello"), r"tokenizer\.json"),
        (lambda llm: llm.chat([{"role": "user", "content": "hello"}]), "chat template"),
        (lambda llm: llm.generate(PROMPTS[:2], [greedy()] * 3), "3 SamplingParams for 2 prompts"),
    ],
)
def test_what_cannot_be_served_starts_nothing(llm: LLM, ask: Callable[[LLM], Any], problem: str):
    with pytest.raises(InvalidRequestError, match=problem):
        ask(llm)
    assert llm.core.is_idle


def test_an_unknown_option_is_refused_with_the_known_ones(tiny_folder: Path):
    with pytest.raises(ConfigError, match=r"max_sequences.*max_num_seqs"):
        LLM(tiny_folder, max_sequences=3)  # type: ignore[call-arg]


def test_a_folder_that_is_not_there_is_a_named_error(tmp_path: Path):
    with pytest.raises(CheckpointError):
        LLM(tmp_path / "absent")


def test_a_closed_llm_says_so(tiny_folder: Path):
    llm = LLM(tiny_folder, **LIMITS)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([1], greedy(1))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_layout": "dense", "scheduler": "plain"},
        *(
            pytest.param(options, marks=pytest.mark.soak)
            for options in (
                {"page_size": 64},
                {"max_num_batched_tokens": 7},
                {"enable_prefix_caching": False},
                {"max_num_seqs": 1},
                {"num_pages": 24},
            )
        ),
    ],
)
def test_no_option_of_the_engine_changes_a_stream(
    llm: LLM, tiny_folder: Path, options: dict[str, object]
):
    params = [greedy(), SamplingParams(max_tokens=12, seed=5, top_p=0.9, ignore_eos=True)] * 3
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(tiny_folder, **{**LIMITS, **options}) as other:
        outputs = other.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected


PROMPT = [(7 + index * 13) % 250 for index in range(150)]
PARAMS = SamplingParams(
    prompt_logprobs=3, logprobs=3, temperature=0.0, max_tokens=4, ignore_eos=True
)


def told(output: RequestOutput) -> list[tuple[float, int | None, tuple[int, ...]]]:
    """Of each position but the first: the token's log probability and rank, and who else is told
    of."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    found: list[tuple[float, int | None, tuple[int, ...]]] = []
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    for token_id, entry in pairs:
        assert entry is not None
        found.append((entry[token_id].logprob, entry[token_id].rank, tuple(entry)))
    return found


def scored(folder: Path, **options: Any) -> LLM:
    return LLM(folder, max_num_seqs=4, max_model_len=256, **options)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    return llm.generate([PROMPT], PARAMS)[0]


def chunked(folder: Path, budget: int, others: Sequence[list[int]]) -> RequestOutput:
    with scored(folder, max_num_batched_tokens=budget) as llm:
        return llm.generate([*others, PROMPT], PARAMS)[-1]


@pytest.mark.parametrize("budget", [7, 33])
def test_another_chunking_and_company_change_no_bit(
    tiny_folder: Path, whole: RequestOutput, budget: int
):
    output = chunked(tiny_folder, budget, [PROMPT[:40], PROMPT[::-1], PROMPT])
    assert told(output) == told(whole)
    assert output.outputs[0] == whole.outputs[0]


def test_a_cached_prompt_is_described_with_the_same_bits(llm: LLM, whole: RequestOutput):
    silent = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate([PROMPT], params)[0] for params in (silent, PARAMS))
    assert told(second) == told(whole)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_prompt_is_described_as_its_tokens_would_be_when_generated(llm: LLM):
    answer = llm.generate([PROMPT[:20]], PARAMS)[0]
    tokens = answer.outputs[0].token_ids
    again = llm.generate([[*PROMPT[:20], *tokens]], PARAMS)[0]
    assert answer.outputs[0].logprobs is not None
    generated = [
        (entry[token_id].logprob, entry[token_id].rank, tuple(entry))
        for token_id, entry in zip(tokens, answer.outputs[0].logprobs, strict=True)
    ]
    assert told(again)[19:] == generated


def test_the_values_are_those_of_the_reference(tiny_folder: Path, whole: RequestOutput):
    reference = build_reference(find_checkpoint(tiny_folder), EngineConfig(), max_model_len=256)
    expected = reference.score(PROMPT)
    assert np.allclose([logprob for logprob, _, _ in told(whole)], expected, atol=1e-4)


EMBEDDED = [[1, 2, 3], [4, 5], [7] * 50, [9], [11] * 200, [12, 13]]
MEAN = PoolingParams(pooling="mean")
TIMEOUT_S = 60


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[tuple[float, ...]]:
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("params", [None, MEAN])
def test_embeddings_come_in_the_prompts_order_and_equal_each_alone(
    llm: LLM, params: PoolingParams | None
):
    together = llm.embed(EMBEDDED, params)
    assert [list(output.prompt_token_ids) for output in together] == EMBEDDED
    assert vectors(together) == [vectors(llm.embed(each, params))[0] for each in EMBEDDED]
    assert len(set(vectors(together))) == len(EMBEDDED)
    for output in together:
        assert output.outputs.finish_reason == "stop"
        assert math.isclose(sum(x * x for x in output.outputs.embedding), 1.0, rel_tol=1e-6)


def test_the_default_is_the_last_tokens_state(llm: LLM):
    last = vectors(llm.embed(EMBEDDED, PoolingParams(pooling="last")))
    assert vectors(llm.embed(EMBEDDED)) == last
    assert vectors(llm.embed(EMBEDDED, MEAN)) != last


def test_dimensions_are_the_first_values_at_unit_length(llm: LLM):
    (whole,) = vectors(llm.embed([5, 6, 7], MEAN))
    (cut,) = vectors(llm.embed([5, 6, 7], PoolingParams(pooling="mean", dimensions=7)))
    length = math.sqrt(sum(x * x for x in whole[:7]))
    assert cut == pytest.approx([x / length for x in whole[:7]], rel=1e-6)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        llm.embed([5], PoolingParams(dimensions=len(whole) + 1))


def test_a_prompt_can_be_cut(llm: LLM):
    (cut,) = llm.embed([1, 2, 3, 4, 5], truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == (4, 5)
    assert vectors([cut]) == vectors(llm.embed([4, 5]))


def test_a_prompt_may_fill_the_context_and_no_more(llm: LLM):
    assert len(llm.embed([3] * 256, MEAN)[0].prompt_token_ids) == 256
    with pytest.raises(InvalidRequestError):
        llm.embed([[1], [3] * 257])
    with pytest.raises(InvalidRequestError):
        llm.embed([[1], []])


def test_texts_are_embedded_as_their_tokens(worded: LLM, worded_text: TextFrontend):
    (output,) = worded.embed("the quick fox")
    assert output.prompt == "the quick fox"
    assert output.prompt_token_ids == worded_text.encode("the quick fox")
    assert vectors([output]) == vectors(worded.embed(list(output.prompt_token_ids)))


def test_concurrent_callers_get_what_llm_gives(tiny_folder: Path, llm: LLM):
    async def play() -> list[EmbeddingRequestOutput]:
        async with AsyncEngine.from_model(tiny_folder, **LIMITS) as engine:
            stream = engine.generate([1], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            calls = (engine.embed(prompt, MEAN) for prompt in EMBEDDED)
            found = await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT_S)
            await stream.aclose()
            return found

    assert vectors(asyncio.run(play())) == vectors(llm.embed(EMBEDDED, MEAN))


def test_the_pooling_is_that_of_the_checkpoint(tiny_folder: Path, tmp_path: Path, llm: LLM):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "1_Pooling").mkdir()
    settings = folder / "1_Pooling" / "config.json"
    settings.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(folder, **LIMITS) as mean:
        assert vectors(mean.embed(EMBEDDED)) == vectors(llm.embed(EMBEDDED, MEAN))
    settings.write_text(json.dumps({"pooling_mode": "cls"}))
    with LLM(folder, **LIMITS) as odd:
        with pytest.raises(InvalidRequestError, match="name last or mean") as refusal:
            odd.embed([1])
        assert refusal.value.param == "pooling"
        assert vectors(odd.embed(EMBEDDED, MEAN)) == vectors(llm.embed(EMBEDDED, MEAN))


def test_a_model_without_a_head_embeds_and_does_not_generate(
    tiny_folder: Path, tmp_path: Path, llm: LLM
):
    folder = write_base_model(tmp_path / "base", tiny_folder)
    with LLM(folder, **LIMITS) as base:
        assert vectors(base.embed(EMBEDDED, MEAN)) == vectors(llm.embed(EMBEDDED, MEAN))
        with pytest.raises(InvalidRequestError, match="cannot generate; ask for embeddings"):
            base.generate([1, 2])
