"""Prompts as dictionaries, and the tokenizer that programs get: the same tokens as otherwise."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cadenza import LLM, AsyncEngine, SamplingParams
from cadenza.errors import InvalidRequestError
from tests.faces.conftest import LIMITS

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
TEXT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": TEXT}]


def test_a_prompt_as_a_dictionary_is_the_text_or_the_ids_in_it(worded: LLM) -> None:
    ids = worded.get_tokenizer().encode(TEXT)
    plain, text, of_ids, both = worded.generate(
        [
            TEXT,
            {"prompt": TEXT},
            {"prompt_token_ids": ids},
            {"prompt": "as it was", "prompt_token_ids": ids},
        ],
        PARAMS,
    )
    assert {each.prompt_token_ids for each in (plain, text, of_ids, both)} == {tuple(ids)}
    assert {each.outputs[0].token_ids for each in (text, of_ids, both)} == {
        plain.outputs[0].token_ids
    }
    assert [each.prompt for each in (text, of_ids, both)] == [TEXT, None, "as it was"]
    (alone,) = worded.generate({"prompt": TEXT}, PARAMS)
    assert alone.outputs[0].token_ids == plain.outputs[0].token_ids
    embedded = worded.embed([TEXT, {"prompt": TEXT}, {"prompt_token_ids": ids}])
    assert len({each.outputs.embedding for each in embedded}) == 1


def test_the_salt_of_a_dictionary_keeps_its_pages_apart(worded: LLM) -> None:
    prompt = [7, 8, 9] * 12
    salted: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in "ab"]
    found = [worded.generate(each, PARAMS)[0] for each in (*salted, salted[0])]
    assert [each.num_cached_tokens > 0 for each in found] == [False, False, True]
    assert len({each.outputs[0].token_ids for each in found}) == 1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({}, "give a text in prompt, or token ids"),
        ({"prompt": None}, "give a text in prompt, or token ids"),
        ({"prompt": [1, 2]}, "in a dictionary it must be a text"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, r"multi_modal_data.image\[0\] is 1"),
        ({"prompt": "a", "multi_modal_data": {"image": b"x"}}, "model worded takes no images"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "has 'mm_processor_kwargs', which is not"),
        ({"prompt_token_ids": ["a"]}, "token ids are whole numbers"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt is 3"),
    ],
)
def test_a_dictionary_without_a_prompt_or_with_an_unknown_member_is_refused(
    worded: LLM, prompt: Any, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        worded.generate([prompt], PARAMS)


def test_an_async_engine_takes_the_same_dictionaries(worded_folder: Path, worded: LLM) -> None:
    long = "the dog " * 400
    cut = {"truncate_prompt_tokens": 9, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (expected,) = worded.generate(long, cut)

    async def play() -> tuple[int, ...]:
        async with AsyncEngine.from_model(worded_folder, **LIMITS) as engine:
            assert engine.get_tokenizer().encode(TEXT) == worded.get_tokenizer().encode(TEXT)
            outputs = [each async for each in engine.generate({"prompt": long}, cut)]
            return outputs[-1].outputs[0].token_ids

    assert asyncio.run(play()) == expected.outputs[0].token_ids


def test_the_tokenizer_gives_what_the_engine_computes(worded: LLM) -> None:
    tokenizer = worded.get_tokenizer()
    (chat,) = worded.chat(MESSAGES, PARAMS)
    assert tuple(tokenizer.apply_chat_template(MESSAGES)) == chat.prompt_token_ids
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == chat.prompt == f"<|user|>{TEXT}<|end|><|assistant|>"
    assert tuple(tokenizer.encode(text, add_special_tokens=False)) == chat.prompt_token_ids
    without = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=False)
    assert without == f"<|user|>{TEXT}<|end|>"
    ids = chat.prompt_token_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer.convert_ids_to_tokens(ids[:1]) == ["<|user|>"]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, None)
    assert tokenizer.special_tokens == {"<|end|>": 0}
    assert tokenizer.vocab_size == len(tokenizer.convert_ids_to_tokens(range(311))) == 311
    assert tokenizer.convert_ids_to_tokens([310, 311])[1] is None


def test_text_that_spells_a_control_token_is_text_to_the_tokenizer(worded: LLM) -> None:
    tokenizer = worded.get_tokenizer()
    ids = tokenizer.encode("<|user|>")
    assert tokenizer.special_tokens["<|end|>"] not in ids
    assert tokenizer.decode(ids) == "<|user|>"
    assert len(ids) > 1


def test_there_is_no_tokenizer_of_a_model_without_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        llm.get_tokenizer()
