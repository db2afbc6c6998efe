"""Images through the Python interfaces, down to a model of random weights that sees."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cadenza import LLM, AsyncEngine, SamplingParams
from cadenza.errors import InvalidRequestError
from tests.faces.conftest import LIMITS
from tests.faces.seeing import text_part, user, write_seeing_model

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **LIMITS) as llm:
        yield llm


def drawn(colour: str, size: tuple[int, int] = (64, 48)) -> dict[str, Any]:
    return {"type": "image", "image": Image.new("RGB", size, colour)}


def tokens(llm: LLM, *parts: Any) -> tuple[int, ...]:
    (output,) = llm.chat([user(*parts)], PARAMS, progress=False)
    return output.outputs[0].token_ids


def test_an_answer_depends_on_the_pixels_and_on_nothing_beside_it(seeing: LLM):
    red, blue = drawn("red"), drawn("blue")
    alone = [tokens(seeing, each, "What?") for each in (red, blue)]
    assert alone[0] != alone[1]
    conversations = [[user(each, "What?")] for each in (blue, red, blue)]
    conversations.append([user("What?")])
    together = seeing.chat(conversations, PARAMS, progress=False)
    assert [each.outputs[0].token_ids for each in together[:3]] == [alone[1], alone[0], alone[1]]
    assert together[3].outputs[0].token_ids == tokens(seeing, "What?")


def test_the_order_of_images_counts_and_equal_ones_are_found_again(seeing: LLM):
    red, blue = drawn("red"), drawn("blue")
    probable = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    orders = [[user(red, blue, "Which?")], [user(blue, red, "Which?")]]
    found = seeing.chat(orders, probable, progress=False)
    assert len({each.outputs[0].cumulative_logprob for each in found}) == 2
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, n=2)
    first, again = (
        seeing.chat([user(red, drawn("green"), "Both?")], params, progress=False)[0]
        for _ in range(2)
    )
    assert again.num_cached_tokens > first.num_cached_tokens
    assert len({each.token_ids for each in (*first.outputs, *again.outputs)}) == 1


def test_a_second_turn_goes_on_behind_the_image(seeing: LLM):
    turns = [user(drawn("red"), "What?"), {"role": "assistant", "content": "red"}, user("And now?")]
    (first,) = seeing.chat(turns, PARAMS, progress=False)
    (fresh,) = seeing.chat(turns, PARAMS, progress=False)
    assert fresh.num_cached_tokens > 0
    assert first.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_placeholders_of_a_raw_prompt_are_images(seeing: LLM):
    prompts = [
        {"prompt": "A <image> b", "multi_modal_data": {"image": drawn(colour)["image"]}}
        for colour in ("red", "blue")
    ]
    red, blue = seeing.generate(prompts, PARAMS, progress=False)
    assert red.outputs[0].token_ids != blue.outputs[0].token_ids
    assert red.prompt == "A <image> b"


def test_log_probabilities_leave_out_placeholders(seeing: LLM):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = seeing.chat([user(drawn("red"), "What?")], params, progress=False)
    shown = output.prompt_logprobs
    assert shown is not None
    image_id = max(set(output.prompt_token_ids), key=output.prompt_token_ids.count)
    absent = [token for token, each in zip(output.prompt_token_ids, shown, strict=True) if not each]
    assert absent[1:] == [image_id] * 20


def test_a_prompt_of_ids_has_no_placeholders(seeing: LLM):
    (output,) = seeing.chat([user(drawn("red"))], PARAMS, progress=False)
    with pytest.raises(InvalidRequestError, match="holds the image token 5 where there is no"):
        seeing.generate([list(output.prompt_token_ids)], PARAMS, progress=False)


def test_an_engine_without_images_refuses_them_and_answers_texts_alike(folder: Path, seeing: LLM):
    with LLM(folder, **LIMITS, images=False) as blind:
        with pytest.raises(InvalidRequestError, match="the model seeing takes no images"):
            tokens(blind, drawn("red"))
        assert tokens(blind, "What?") == tokens(seeing, "What?")


def test_the_async_engine_answers_as_the_offline_one(folder: Path, seeing: LLM):
    message = user(drawn("red"), text_part("What?"))

    async def ask() -> tuple[int, ...]:
        async with AsyncEngine.from_model(folder, **LIMITS) as engine:
            outputs = [each async for each in engine.chat([message], PARAMS, kind="final")]
        return outputs[-1].outputs[0].token_ids

    assert asyncio.run(ask()) == tokens(seeing, drawn("red"), "What?")
