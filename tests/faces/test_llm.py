"""`LLM`: many prompts at once, streams read in turns, errors before anything starts."""

from pathlib import Path

import pytest

from cadenza import LLM, SamplingParams
from cadenza.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineStalledError,
    InvalidRequestError,
)
from tests.faces.conftest import LIMITS

PROMPTS = [[1, 2, 3], [4, 5], [7] * 50, [9], [11] * 20, [12, 13]]


def greedy(max_tokens: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)  # type: ignore[arg-type]


def test_results_come_in_the_prompts_order_and_equal_each_prompt_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, greedy())
    assert [list(output.prompt_token_ids) for output in together] == PROMPTS
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = llm.generate(prompt, greedy())[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 12


def test_more_prompts_than_the_queue_holds_are_all_answered(llm: LLM) -> None:
    prompts = [[1 + index % 300] for index in range(70)]
    outputs = llm.generate(prompts, greedy(3))
    assert [list(output.prompt_token_ids) for output in outputs] == prompts


def test_an_engine_that_computes_nothing_ends_the_call_with_an_error_and_not_the_next_one(
    llm: LLM,
) -> None:
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


def test_prompts_wait_for_room_while_another_stream_that_is_half_read_fills_the_queue(
    llm: LLM,
) -> None:
    (alone,) = llm.generate([5, 6], greedy())
    stream = llm.stream([[1 + index] for index in range(60)], greedy(40), kind="final")
    half_read = [next(stream)]
    assert not llm.core.num_queue_slots
    (beside,) = llm.generate([5, 6], greedy())
    assert beside.outputs == alone.outputs
    assert [len(output.outputs[0].token_ids) for output in [*half_read, *stream]] == [40] * 60


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
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


def test_two_streams_read_in_turns_are_what_each_is_alone(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], greedy())]
    streams = [llm.stream(prompt, greedy()) for prompt in PROMPTS[:2]]
    last = [next(stream) for stream in streams]
    for pair in zip(*streams, strict=False):
        last = list(pair)
    last[1] = [last[1], *streams[1]][-1]
    assert [output.outputs[0].token_ids for output in last] == expected
    assert all(output.finished for output in last)


def test_closing_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, greedy(100))
    next(stream)
    assert not llm.core.is_idle
    stream.close()  # type: ignore[attr-defined]
    llm.generate([5], greedy(1))
    counts = llm.core.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)


VARIED = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 30}


def test_a_stop_string_frees_its_request_and_leaves_the_others_as_they_are(worded: LLM) -> None:
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


def test_each_sample_ends_at_its_own_stop_string(worded: LLM) -> None:
    asked = {**VARIED, "seed": 3, "n": 4}
    (whole,) = worded.generate([PROMPTS[0]], asked)
    stop = whole.outputs[1].text[4:8]
    (cut,) = worded.generate([PROMPTS[0]], {**asked, "stop": stop})
    assert [each.text for each in cut.outputs] == [
        each.text.split(stop)[0] for each in whole.outputs
    ]
    assert cut.outputs[1].stop_reason == stop
    assert cut.finished


def test_deltas_of_a_stream_put_together_are_what_generate_gives(worded: LLM) -> None:
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


def test_a_prompt_that_fills_the_context_is_described_when_no_token_is_asked_for(llm: LLM) -> None:
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


def test_an_invalid_prompt_among_valid_ones_starts_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="331"):
        llm.generate([[1], [331]], greedy())
    assert llm.core.is_idle


@pytest.mark.parametrize("prompt", [[], [-1], [True], [1.5]])
def test_a_malformed_prompt_is_refused(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([prompt], greedy())


def test_text_without_a_tokenizer_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        llm.generate("hello")
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_wrong_number_of_params_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="3 SamplingParams for 2 prompts"):
        llm.generate(PROMPTS[:2], [greedy()] * 3)


def test_an_unknown_option_is_refused_with_the_known_ones(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_sequences.*max_num_seqs"):
        LLM(tiny_folder, max_sequences=3)  # type: ignore[call-arg]


def test_a_folder_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(tmp_path / "absent")


def test_a_closed_llm_says_so(tiny_folder: Path) -> None:
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
) -> None:
    params = [greedy(), SamplingParams(max_tokens=12, seed=5, top_p=0.9, ignore_eos=True)] * 3
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(tiny_folder, **{**LIMITS, **options}) as other:
        outputs = other.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
