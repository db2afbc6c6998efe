"""What a request gets for what it leaves unset: the checkpoint's recommendations, or Cadenza's."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults, with_assumed
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.frontend.sampling_defaults import SamplingDefaults
from cadenza.frontend.text_frontend import TextFrontend

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


def test_unset_fields_are_as_recommended_and_set_ones_as_given() -> None:
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


def test_without_recommendations_unset_fields_are_those_of_sampling_params() -> None:
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
) -> None:
    defaults = SamplingDefaults(recommended)
    assert (defaults.source, defaults.sentence) == (source, sentence)
    params = defaults.complete({})
    assert defaults.described == {name: getattr(params, name) for name in defaults.described}


def test_what_is_assumed_is_not_in_the_text_that_the_fingerprint_is_made_of() -> None:
    stated = GenerationDefaults(**ASSUMED_OF_GGUF)  # type: ignore[arg-type]
    assert repr(ASSUMED) == repr(stated)
    assert stated != ASSUMED


def test_what_was_given_as_none_was_given() -> None:
    assert SamplingDefaults(RECOMMENDED).complete({"max_tokens": None}).max_tokens is None


@given(longest=LENGTHS, shortest=LENGTHS, asked=LENGTHS, least=LENGTHS, room=LENGTHS)
def test_a_recommended_length_never_makes_a_request_invalid(
    longest: int | None,
    shortest: int | None,
    asked: int | None,
    least: int | None,
    room: int | None,
) -> None:
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


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_q.*top_p") as refusal:
        SamplingDefaults().complete({"top_q": 1})
    assert refusal.value.param == "top_q"


def test_llm_shows_and_follows_the_recommendations(folder: Path) -> None:
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


def test_a_recommended_length_gives_way_to_the_context(folder: Path) -> None:
    with LLM(folder, max_num_seqs=2, max_model_len=32) as llm:
        (output,) = llm.generate([[5] * 10], {"ignore_eos": True})
        assert len(output.outputs[0].token_ids) == 22
        with pytest.raises(InvalidRequestError, match="maximum context length is 32 tokens"):
            llm.generate([[5] * 10], {"max_tokens": 40})


def test_none_leaves_the_recommendations_aside(folder: Path) -> None:
    with LLM(folder, max_num_seqs=2, max_model_len=64, generation_config="none") as llm:
        assert llm.default_sampling_params == SamplingParams()


def test_a_recommendation_that_is_not_applied_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    checkpoint = open_checkpoint(folder)
    with caplog.at_level(logging.WARNING):
        TextFrontend(checkpoint, generation_config="none")
        assert not caplog.records
        TextFrontend(checkpoint)
    assert ["num_beams" in record.getMessage() for record in caplog.records] == [True]
