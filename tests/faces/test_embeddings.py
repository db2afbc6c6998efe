"""Embeddings through `LLM` and `AsyncEngine`."""

import asyncio
import json
import math
import shutil
from pathlib import Path

import pytest

from cadenza import LLM, AsyncEngine, EmbeddingRequestOutput, PoolingParams, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.frontend.text_frontend import TextFrontend
from tests.checkpoint.files import write_base_model
from tests.faces.conftest import LIMITS

PROMPTS = [[1, 2, 3], [4, 5], [7] * 50, [9], [11] * 200, [12, 13]]
MEAN = PoolingParams(pooling="mean")
TIMEOUT_S = 60


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[tuple[float, ...]]:
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("params", [None, MEAN])
def test_results_come_in_the_prompts_order_and_equal_each_prompt_alone(
    llm: LLM, params: PoolingParams | None
) -> None:
    together = llm.embed(PROMPTS, params)
    assert [list(output.prompt_token_ids) for output in together] == PROMPTS
    assert vectors(together) == [vectors(llm.embed(each, params))[0] for each in PROMPTS]
    assert len(set(vectors(together))) == len(PROMPTS)
    for output in together:
        assert output.outputs.finish_reason == "stop"
        assert math.isclose(sum(x * x for x in output.outputs.embedding), 1.0, rel_tol=1e-6)


def test_the_default_is_the_last_tokens_state(llm: LLM) -> None:
    last = vectors(llm.embed(PROMPTS, PoolingParams(pooling="last")))
    assert vectors(llm.embed(PROMPTS)) == last
    assert vectors(llm.embed(PROMPTS, MEAN)) != last


def test_dimensions_are_the_first_values_at_unit_length(llm: LLM) -> None:
    (whole,) = vectors(llm.embed([5, 6, 7], MEAN))
    (cut,) = vectors(llm.embed([5, 6, 7], PoolingParams(pooling="mean", dimensions=7)))
    length = math.sqrt(sum(x * x for x in whole[:7]))
    assert cut == pytest.approx([x / length for x in whole[:7]], rel=1e-6)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        llm.embed([5], PoolingParams(dimensions=len(whole) + 1))


def test_a_prompt_can_be_cut(llm: LLM) -> None:
    (cut,) = llm.embed([1, 2, 3, 4, 5], truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == (4, 5)
    assert vectors([cut]) == vectors(llm.embed([4, 5]))


def test_a_prompt_may_fill_the_context_and_no_more(llm: LLM) -> None:
    assert len(llm.embed([3] * 256, MEAN)[0].prompt_token_ids) == 256
    with pytest.raises(InvalidRequestError):
        llm.embed([[1], [3] * 257])
    with pytest.raises(InvalidRequestError):
        llm.embed([[1], []])


def test_texts_are_embedded_as_their_tokens(worded: LLM, worded_text: TextFrontend) -> None:
    (output,) = worded.embed("the quick fox")
    assert output.prompt == "the quick fox"
    assert output.prompt_token_ids == worded_text.encode("the quick fox")
    assert vectors([output]) == vectors(worded.embed(list(output.prompt_token_ids)))


def test_concurrent_callers_get_what_llm_gives(tiny_folder: Path, llm: LLM) -> None:
    async def play() -> list[EmbeddingRequestOutput]:
        async with AsyncEngine.from_model(tiny_folder, **LIMITS) as engine:
            stream = engine.generate([1], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            calls = (engine.embed(prompt, MEAN) for prompt in PROMPTS)
            found = await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT_S)
            await stream.aclose()
            return found

    assert vectors(asyncio.run(play())) == vectors(llm.embed(PROMPTS, MEAN))


def test_the_pooling_is_that_of_the_checkpoint(tiny_folder: Path, tmp_path: Path, llm: LLM) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "1_Pooling").mkdir()
    settings = folder / "1_Pooling" / "config.json"
    settings.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(folder, **LIMITS) as mean:
        assert vectors(mean.embed(PROMPTS)) == vectors(llm.embed(PROMPTS, MEAN))
    settings.write_text(json.dumps({"pooling_mode": "cls"}))
    with LLM(folder, **LIMITS) as odd:
        with pytest.raises(InvalidRequestError, match="name last or mean") as refusal:
            odd.embed([1])
        assert refusal.value.param == "pooling"
        assert vectors(odd.embed(PROMPTS, MEAN)) == vectors(llm.embed(PROMPTS, MEAN))


def test_a_model_without_a_head_embeds_and_does_not_generate(
    tiny_folder: Path, tmp_path: Path, llm: LLM
) -> None:
    folder = write_base_model(tmp_path / "base", tiny_folder)
    with LLM(folder, **LIMITS) as base:
        assert vectors(base.embed(PROMPTS, MEAN)) == vectors(llm.embed(PROMPTS, MEAN))
        with pytest.raises(InvalidRequestError, match="cannot generate; ask for embeddings"):
            base.generate([1, 2])
