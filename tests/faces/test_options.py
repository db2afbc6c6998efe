"""The engine's options that are no number of the plan: each reaches the engine or its text side."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cadenza import LLM, AsyncEngine, EngineConfig, SamplingParams
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults, with_assumed
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import (
    CheckpointError,
    ConfigError,
    DeviceUnavailableError,
    InvalidRequestError,
)
from cadenza.frontend.loaded_model import open_text
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.sampling_defaults import SamplingDefaults
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import find_checkpoint, find_configured, plan_model
from cadenza.loading.planned_engine import PlannedEngine
from tests.checkpoint.files import write_folder
from tests.faces.conftest import LIMITS
from tests.text.vocabularies import byte_level

DRAWN = SamplingParams(max_tokens=12, ignore_eos=True)
SMALL = {"max_num_seqs": 2, "max_model_len": 64}


def test_the_chosen_backend_device_and_operations_are_planned(tiny_folder: Path):
    checkpoint = find_checkpoint(tiny_folder)
    for backend in ("auto", "xla"):
        config = EngineConfig(backend=backend, device="cpu", ops="reference")
        traits = plan_model(checkpoint, config).traits
        assert (traits.name, traits.ops) == ("xla:cpu", "reference")
    with pytest.raises(DeviceUnavailableError, match="cuda:9"):
        plan_model(checkpoint, EngineConfig(device="cuda:9"))
    with pytest.raises(ConfigError, match=r"--backend 'tensor' is not one of auto, xla, mlx, iree"):
        LLM(tiny_folder / "absent", backend="tensor")


def test_the_seed_the_scheduler_and_the_recommended_sampling_reach_the_engine(
    tiny_folder: Path, tmp_path: Path, llm: LLM
):
    folder = copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    with LLM(folder, **SMALL) as plain:
        assert plain.default_sampling_params.temperature == 0.25
        assert plain.core.loop._depth == 1
        drawn = plain.generate([1, 2], DRAWN)[0].outputs
    chosen = {"seed": 11, "scheduler": "plain", "generation_config": "none"}
    with LLM(folder, **SMALL, **chosen) as other:
        assert other.default_sampling_params.temperature == 1.0
        assert other.core.loop._depth == 0
        assert other.generate([1, 2], DRAWN)[0].outputs != drawn


SHOUT = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"


@pytest.mark.parametrize("kind", ["file", "path", "text"])
def test_a_given_chat_template_is_used_in_place_of_the_models(
    worded_folder: Path, tmp_path: Path, kind: str
):
    file = tmp_path / "{{shout}}.jinja"
    file.write_text(SHOUT)
    forms: dict[str, Any] = {"file": str(file), "path": file, "text": SHOUT}
    given = EngineConfig(chat_template=forms[kind])
    asked = [{"role": "user", "content": "the fox"}]
    checkpoint = find_configured(worded_folder, given)
    assert open_text(checkpoint, given).render_chat(ChatPrompt(messages=asked))[0] == "THE FOX"
    own = find_configured(worded_folder, EngineConfig())
    assert open_text(own, EngineConfig()).render_chat(ChatPrompt(messages=asked))[0] != "THE FOX"
    plan = plan_model(own, EngineConfig())
    fingerprints = [
        PlannedEngine(checkpoint=each, plan=plan, config=given).identity().fingerprint
        for each in (checkpoint, own)
    ]
    assert fingerprints[0].template != fingerprints[1].template
    assert replace(fingerprints[0], template="") == replace(fingerprints[1], template="")


def test_without_its_chat_template_a_model_takes_plain_prompts_only(worded_folder: Path):
    config = EngineConfig(chat_template="none")
    checkpoint = find_configured(worded_folder, config)
    text = open_text(checkpoint, config)
    assert text.prompts.template is None
    assert text.encode("the fox")
    with pytest.raises(InvalidRequestError, match="no chat template; give a plain prompt"):
        text.render_chat(ChatPrompt(messages=[{"role": "user", "content": "the fox"}]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no-such-file.jinja", "there is no such file, and it is not the text of a template"),
        (Path("no-such-file.jinja"), "there is no such file"),
        ("{no}/such-file.jinja", "there is no such file"),
        ('{"a": 1}', r"a template, which has \{\{ or \{%; name a file"),
        ("x" * 5000, "there is no such file"),
        ("{% for %}", "not valid Jinja"),
        ("{{" + "x" * (1 << 20), r"over 1\.0 MiB"),
        ("", "must be a file, or the text"),
        (5, "must be a file, or the text"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    worded_folder: Path, given: str | Path, said: str
):
    with pytest.raises((CheckpointError, ConfigError), match=said):
        LLM(worded_folder, chat_template=given)


def test_a_file_without_jinja_is_no_chat_template(worded_folder: Path, tmp_path: Path):
    (tmp_path / "notes.txt").write_text('{"a": "hello"}')
    config = EngineConfig(chat_template=str(tmp_path / "notes.txt"))
    with pytest.raises(CheckpointError, match=r"notes\.txt writes no message"):
        find_configured(worded_folder, config)


RECOMMENDED = GenerationDefaults(
    temperature=0.6,
    top_k=20,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    min_new_tokens=3,
    max_new_tokens=100,
)
ASSUMED = with_assumed(GenerationDefaults(), ASSUMED_OF_GGUF)
PARTLY = with_assumed(GenerationDefaults(temperature=0.5, top_k=3, top_p=0.5), ASSUMED_OF_GGUF)
LENGTHS = st.none() | st.integers(1, 300)


@pytest.fixture
def folder(worded_folder: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(worded_folder, tmp_path / "model")
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 40}
    (copy / "generation_config.json").write_text(json.dumps(recommended))
    return copy


def test_unset_fields_are_as_recommended_and_set_ones_as_given():
    params = SamplingDefaults(RECOMMENDED).complete({"top_k": 0, "seed": 4})
    assert params == SamplingParams(
        temperature=0.6,
        top_k=0,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        min_tokens=3,
        max_tokens=100,
        seed=4,
    )


def test_without_recommendations_unset_fields_are_those_of_sampling_params():
    assert SamplingDefaults().complete({}) == SamplingParams()
    assert SamplingDefaults(GenerationDefaults()).complete({}) == SamplingParams()


@pytest.mark.parametrize(
    ("recommended", "source", "sentence"),
    [
        (None, "neutral", "temperature 1, no cuts"),
        (GenerationDefaults(max_new_tokens=9), "neutral", "temperature 1, no cuts"),
        (
            GenerationDefaults(temperature=0.6, top_k=20),
            "model",
            "temperature 0.6, top_k 20 (as the model recommends)",
        ),
        (
            ASSUMED,
            "llama.cpp",
            "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (as in llama.cpp: the file "
            "recommends none)",
        ),
        (
            PARTLY,
            "llama.cpp",
            "temperature 0.5, top_k 3, top_p 0.5, min_p 0.05 (min_p as in llama.cpp: the file "
            "recommends none)",
        ),
    ],
)
def test_the_defaults_are_described_with_where_they_come_from(
    recommended: GenerationDefaults | None, source: str, sentence: str
):
    defaults = SamplingDefaults(recommended)
    assert (defaults.source, defaults.sentence) == (source, sentence)
    params = defaults.complete({})
    assert defaults.described == {name: getattr(params, name) for name in defaults.described}


def test_what_is_assumed_is_not_in_the_text_that_the_fingerprint_is_made_of():
    stated = GenerationDefaults(**ASSUMED_OF_GGUF)  # type: ignore[arg-type]
    assert repr(ASSUMED) == repr(stated)
    assert stated != ASSUMED


def test_what_was_given_as_none_was_given():
    assert SamplingDefaults(RECOMMENDED).complete({"max_tokens": None}).max_tokens is None


@given(longest=LENGTHS, shortest=LENGTHS, asked=LENGTHS, least=LENGTHS, room=LENGTHS)
def test_a_recommended_length_never_makes_a_request_invalid(
    longest: int | None,
    shortest: int | None,
    asked: int | None,
    least: int | None,
    room: int | None,
):
    recommended = GenerationDefaults(max_new_tokens=longest, min_new_tokens=shortest)
    lengths = {"max_tokens": asked, "min_tokens": least}
    asked_for = {name: value for name, value in lengths.items() if value is not None}
    try:
        SamplingParams(**asked_for)  # type: ignore[arg-type]
    except InvalidRequestError:
        return
    params = SamplingDefaults(recommended).complete(asked_for, room=room)
    for name, value in asked_for.items():
        assert getattr(params, name) == value
    if room is not None and longest is not None and asked is None and least is None:
        assert params.max_tokens == min(longest, room)


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(InvalidRequestError, match=r"top_q.*top_p") as refusal:
        SamplingDefaults().complete({"top_q": 1})
    assert refusal.value.param == "top_q"


def test_llm_shows_and_follows_the_recommendations(folder: Path):
    with LLM(folder, max_num_seqs=2, max_model_len=64) as llm:
        shown = llm.default_sampling_params
        assert (shown.temperature, shown.top_k, shown.top_p) == (0.6, 20, 0.9)
        given = {"seed": 7, "ignore_eos": True}
        (partly,) = llm.generate([[5, 6]], given)
        (wholly,) = llm.generate([[5, 6]], llm.default_params(**given))
        (alone,) = llm.generate([[5, 6]], SamplingParams(max_tokens=40, **given))  # type: ignore[arg-type]
    assert len(partly.outputs[0].token_ids) == 40
    assert partly.outputs == wholly.outputs
    assert alone.outputs[0].token_ids != partly.outputs[0].token_ids


def test_a_recommended_length_gives_way_to_the_context(folder: Path):
    with LLM(folder, max_num_seqs=2, max_model_len=32) as llm:
        (output,) = llm.generate([[5] * 10], {"ignore_eos": True})
        assert len(output.outputs[0].token_ids) == 22
        with pytest.raises(InvalidRequestError, match="maximum context length is 32 tokens"):
            llm.generate([[5] * 10], {"max_tokens": 40})


def test_none_leaves_the_recommendations_aside(folder: Path):
    with LLM(folder, max_num_seqs=2, max_model_len=64, generation_config="none") as llm:
        assert llm.default_sampling_params == SamplingParams()


def test_a_recommendation_that_is_not_applied_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    checkpoint = open_checkpoint(folder)
    with caplog.at_level(logging.WARNING):
        TextFrontend(checkpoint, generation_config="none")
        assert not caplog.records
        TextFrontend(checkpoint)
    assert ["num_beams" in record.getMessage() for record in caplog.records] == [True]


PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
TEXT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": TEXT}]


def test_a_prompt_as_a_dictionary_is_the_text_or_the_ids_in_it(worded: LLM):
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


def test_the_salt_of_a_dictionary_keeps_its_pages_apart(worded: LLM):
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
):
    with pytest.raises(InvalidRequestError, match=said):
        worded.generate([prompt], PARAMS)


def test_an_async_engine_takes_the_same_dictionaries(worded_folder: Path, worded: LLM):
    long = "the dog " * 400
    cut = {"truncate_prompt_tokens": 9, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (expected,) = worded.generate(long, cut)

    async def play() -> tuple[int, ...]:
        async with AsyncEngine.from_model(worded_folder, **LIMITS) as engine:
            assert engine.get_tokenizer().encode(TEXT) == worded.get_tokenizer().encode(TEXT)
            outputs = [each async for each in engine.generate({"prompt": long}, cut)]
            return outputs[-1].outputs[0].token_ids

    assert asyncio.run(play()) == expected.outputs[0].token_ids


def test_the_tokenizer_gives_what_the_engine_computes(worded: LLM):
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


def test_text_that_spells_a_control_token_is_text_to_the_tokenizer(worded: LLM):
    tokenizer = worded.get_tokenizer()
    ids = tokenizer.encode("<|user|>")
    assert tokenizer.special_tokens["<|end|>"] not in ids
    assert tokenizer.decode(ids) == "<|user|>"
    assert len(ids) > 1


def test_there_is_no_tokenizer_of_a_model_without_one(llm: LLM):
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        llm.get_tokenizer()


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def face(tmp_path: Path) -> TextFrontend:
    folder = write_folder(tmp_path, {"chat_template.jinja": TEMPLATE})
    byte_level(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>"}))
    return TextFrontend(open_checkpoint(folder))


def test_a_raw_prompt_is_text_behind_the_tokenizers_own_start(face: TextFrontend):
    assert face.encode("the<|end|>")[0] == 0
    assert 1 not in face.encode("the<|end|>")
    assert face.encode("<|start|>").count(0) == 1


def test_a_chat_has_one_start_and_the_templates_ends(face: TextFrontend):
    text, token_ids = face.render_chat(
        ChatPrompt(messages=[{"role": "user", "content": "<|start|>the<|end|>"}])
    )
    assert text == "<|start|><|start|>the<|end|><|end|>"
    assert (token_ids.count(0), token_ids.count(1)) == (1, 1)
    assert (token_ids[0], token_ids[-1]) == (0, 1)
