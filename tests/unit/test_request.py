"""Bounds of what a client may ask: whatever is out of them is refused by the name of its param."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.draw_keys import derive_seed, draw_keys
from cadenza.bounds import MAX_BIASES
from cadenza.engine.new_sequences import seed_of_sample
from cadenza.errors import InvalidRequestError
from cadenza.request import MAX_BAD_WORD_TOKENS, Attachment, Request, SamplingParams
from cadenza.structured import StructuredOutput

BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (0, 2**31),
    "min_tokens": (0, 2**31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "n": (1, 16),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (1, 2**31),
}
WHOLE = frozenset(
    "top_k seed max_tokens min_tokens n logprobs prompt_logprobs truncate_prompt_tokens".split()
)
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
TEXT_LISTS = {"stop": 64, "bad_words": 128}
ID_LISTS = {"stop_token_ids": 128, "allowed_token_ids": 2**20}
NOT_NUMBERS: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, True, False),
    *("1", b"1", [1], (1,), {"a": 1}, 1j),
)


def params_with(name: str, value: object) -> SamplingParams:
    """`max_tokens` gives way, so that it refuses no `min_tokens`."""
    return SamplingParams(**{"max_tokens": None, name: value})  # type: ignore[arg-type]


def refused_param(**params: object) -> str | None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert str(refusal.value)
    return refusal.value.param


@pytest.mark.parametrize("name", BOUNDS)
def test_both_bounds_of_a_number_are_allowed_and_what_is_past_them_is_refused(name: str) -> None:
    low, high = BOUNDS[name]
    for bound in (low, high):
        kept = {"seed": bound % 2**64, "top_p": max(bound, 1e-6)}.get(name, bound)
        assert getattr(params_with(name, bound), name) == kept
    beyond: list[float] = [10**400, -(10**400), *NOT_NUMBERS]
    if name in WHOLE:
        far = (low - 1, high + 1, 2**63, -(2**63), 2**64, 10**30)
        beyond += [value for value in far if not low <= value <= high]
        beyond += [1.5, 1.0]
    else:
        beyond += [math.nextafter(low, -9), math.nextafter(high, 1e9), 2**63, -(2**63), -2.001]
    for value in beyond:
        assert refused_param(**{name: value}) == name, value


def test_none_is_a_value_only_where_it_means_something() -> None:
    for name in BOUNDS:
        if name in OPTIONAL:
            assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]
        else:
            assert refused_param(**{name: None}) == name


@given(value=st.one_of(st.floats(), st.integers()), name=st.sampled_from(sorted(BOUNDS)))
def test_params_that_exist_are_finite_and_within_bounds(value: float, name: str) -> None:
    try:
        params = params_with(name, value)
    except InvalidRequestError as refusal:
        param = refusal.param
    else:
        param = None
        low, high = BOUNDS[name]
        kept = getattr(params, name)
        assert (low <= kept <= high) if (name, value) != ("seed", -1) else kept is None
    assert param in (None, name)


SEEDS = {
    None: None,
    -1: None,
    0: 0,
    2**63 - 1: 2**63 - 1,
    2**63: 2**63,
    2**64 - 1: 2**64 - 1,
    -2: 2**64 - 2,
    -(2**63): 2**63,
}


def test_a_seed_is_any_integer_of_64_bits_and_minus_one_is_none() -> None:
    for seed, kept in SEEDS.items():
        params = SamplingParams(seed=seed)
        assert params.seed == SamplingParams(seed=params.seed).seed == kept
        used = seed_of_sample(params, 0, request_id=5, engine_seed=3)
        assert used == (derive_seed(3, 5) if kept is None else kept)
        assert draw_keys(np.array([used], np.uint64), np.array([1], np.int32)).shape == (1, 2)


def test_temperatures_below_a_hundred_thousandth_are_greedy() -> None:
    for temperature, is_greedy in ((0.0, True), (9e-6, True), (1e-5, False), (1.0, False)):
        assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize("name", ID_LISTS)
def test_the_number_of_token_ids_is_bounded(name: str) -> None:
    most = tuple(range(ID_LISTS[name]))
    assert getattr(SamplingParams(**{name: list(most)}), name) == most  # type: ignore[arg-type]
    assert refused_param(**{name: (*most, 1)}) == name


@pytest.mark.parametrize("name", ID_LISTS)
def test_what_is_no_list_of_whole_numbers_is_refused_by_name(name: str) -> None:
    for ids in (5, "12", (1.5,), ("1",), (True,), (None,), (math.nan,)):
        assert refused_param(**{name: ids}) == name, ids


@pytest.mark.parametrize("name", TEXT_LISTS)
def test_the_number_and_length_of_texts_are_bounded(name: str) -> None:
    most = ("x" * 256,) * TEXT_LISTS[name]
    assert getattr(SamplingParams(**{name: list(most)}), name) == most  # type: ignore[arg-type]
    assert refused_param(**{name: (*most, "y")}) == name
    for texts in (("x" * 257,), ("",), (5,), (None,), 5, None, {"a": "b"}):
        assert refused_param(**{name: texts}) == name


def test_one_text_may_stand_for_a_list_of_stops_and_of_nothing_else() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert refused_param(bad_words="end") == "bad_words"


def test_an_empty_list_of_allowed_tokens_is_refused() -> None:
    for ids in ((), []):
        assert refused_param(allowed_token_ids=ids) == "allowed_token_ids"
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None


def test_biases_are_kept_as_pairs_by_rising_id() -> None:
    expected = ((2, 1), (7, -100.0))
    assert SamplingParams(logit_bias={7: -100.0, 2: 1}).biases == expected
    assert SamplingParams(logit_bias=[(7, -100.0), (2, 1)]).logit_bias == expected
    assert hash(SamplingParams(logit_bias={7: -100.0, 2: 1})) == hash(
        SamplingParams(logit_bias=expected)
    )


def test_what_is_no_bias_for_each_token_is_refused_by_name() -> None:
    keys = [{key: 1.0} for key in ("1", 1.5, True)]
    values = [{1: value} for value in (math.nan, math.inf, 100.01, -100.01, "1", None, True)]
    too_many = dict.fromkeys(range(MAX_BIASES + 1), 1.0)
    for biases in (5, "ab", None, [1], [(1, 2, 3)], *keys, *values, too_many):
        assert refused_param(logit_bias=biases) == "logit_bias", biases


def test_the_least_number_of_tokens_is_not_above_the_most() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert refused_param(min_tokens=17) == "min_tokens"


def test_bad_words_of_a_request_are_bounded_token_sequences() -> None:
    longest = (tuple(range(MAX_BAD_WORD_TOKENS - 1)),)
    assert Request(prompt_token_ids=(1,), bad_word_token_ids=longest)
    for words in (((),), ((1.5,),), ("ab",), (tuple(range(MAX_BAD_WORD_TOKENS)),)):
        with pytest.raises(InvalidRequestError) as refusal:
            Request(prompt_token_ids=(1,), bad_word_token_ids=words)  # type: ignore[arg-type]
        assert refusal.value.param == "bad_words"


def test_a_switch_that_is_neither_true_nor_false_is_refused_by_name() -> None:
    for name in SWITCHES:
        for value in ("yes", 1, None, 0.0):
            assert refused_param(**{name: value}) == name


def test_requests_and_params_are_frozen() -> None:
    request = Request(prompt_token_ids=(1, 2))
    with pytest.raises(AttributeError):
        request.cache_salt = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        request.params.top_k = 3  # type: ignore[misc]


def test_attachments_are_kept_in_the_order_of_their_spans() -> None:
    pair: Any = [
        Attachment(start=0, length=2, digest=b"a"),
        Attachment(start=2, length=1, digest=b"b"),
    ]
    request = Request(prompt_token_ids=(1, 2, 3), attachments=pair)
    assert request.attachments == tuple(pair)
    assert [each.end for each in request.attachments] == [2, 3]


def test_attachments_outside_the_prompt_or_each_other_are_refused() -> None:
    for spans in ([(0, 4)], [(3, 1)], [(0, 0)], [(1, 2), (0, 1)], [(0, 2), (1, 1)]):
        attachments = tuple(Attachment(start=at, length=size, digest=b"a") for at, size in spans)
        with pytest.raises(InvalidRequestError, match="spans tokens") as caught:
            Request(prompt_token_ids=(1, 2, 3), attachments=attachments)
        assert caught.value.param == "attachments"


ODD_ATTACHMENTS: dict[str, tuple[Any, ...]] = {
    "start": (-1, 0.5, True),
    "length": ("3",),
    "digest": (b"", b"a" * 65, "a"),
    "payload": (None,),
}


def test_an_attachment_of_other_values_is_refused() -> None:
    for name, values in ODD_ATTACHMENTS.items():
        for value in values:
            fields: dict[str, Any] = {"start": 0, "length": 1, "digest": b"a", name: value}
            with pytest.raises(InvalidRequestError):
                Attachment(**fields)
    for odd in (None, 5, "image", [b"image"]):
        with pytest.raises(InvalidRequestError, match="tuple of Attachment"):
            Request(prompt_token_ids=(1, 2, 3), attachments=odd)  # type: ignore[arg-type]


def test_structured_outputs_is_another_name_of_structured() -> None:
    form = StructuredOutput(regex="a+")
    plain = SamplingParams(structured=form, max_tokens=3)
    for meant in (form, {"regex": "a+"}, {"regex": "a+", "json": None}):
        params = SamplingParams(structured_outputs=meant, max_tokens=3)
        assert params == plain
        assert params.structured_outputs == params.structured == form
        assert replace(params, max_tokens=4).structured == form
    assert SamplingParams(structured_outputs=None).structured is None
    compact = {"json_object": True, "disable_any_whitespace": True}
    asked = SamplingParams(structured_outputs=compact).structured
    assert asked == StructuredOutput(json_object=True, whitespace="compact")
    for wrong in ({}, {"odd": 1}, "a+", 3):
        with pytest.raises(InvalidRequestError, match=r"structured output is .* must be"):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="both given"):
        SamplingParams(structured=form, structured_outputs=form)
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]
