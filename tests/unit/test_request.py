"""Bounds of what a client may ask: whatever is out of them is refused by the name of its param."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.errors import InvalidRequestError
from cadenza.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams

MAX_SEED = 2**63 - 1
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, 2**31),
    "logprobs": (0, 20),
}
WHOLE = ("top_k", "seed", "max_tokens", "logprobs")
OPTIONAL = ("seed", "max_tokens", "logprobs")
NOT_NUMBERS: tuple[object, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "1",
    b"1",
    [1],
    (1,),
    {"a": 1},
    1j,
    object(),
)


def refused_param(**params: object) -> str | None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert str(refusal.value)
    return refusal.value.param


@pytest.mark.parametrize("name", BOUNDS)
def test_both_bounds_of_a_number_are_allowed(name: str) -> None:
    for bound in BOUNDS[name]:
        params = SamplingParams(**{name: bound})  # type: ignore[arg-type]
        assert getattr(params, name) == bound


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_just_past_a_bound_is_refused_by_name(name: str) -> None:
    low, high = BOUNDS[name]
    if name in WHOLE:
        beyond: list[float] = [low - 1, high + 1, 2**63, -(2**63), 2**64, 10**30]
    else:
        beyond = [math.nextafter(low, -1), math.nextafter(high, 1e9), 2**63, -(2**63), -1e-9]
    for value in beyond:
        assert refused_param(**{name: value}) == name


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_no_finite_number_is_refused_by_name(name: str, value: object) -> None:
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize("name", BOUNDS)
def test_a_number_too_big_for_a_float_is_refused_by_name(name: str) -> None:
    assert refused_param(**{name: 10**400}) == name
    assert refused_param(**{name: -(10**400)}) == name


@pytest.mark.parametrize("name", WHOLE)
def test_a_fraction_is_no_whole_number(name: str) -> None:
    assert refused_param(**{name: 1.5}) == name
    assert refused_param(**{name: 1.0}) == name


@pytest.mark.parametrize("name", BOUNDS)
def test_none_is_a_value_only_where_it_means_something(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]
    else:
        assert refused_param(**{name: None}) == name


@given(value=st.one_of(st.floats(), st.integers()), name=st.sampled_from(sorted(BOUNDS)))
def test_params_that_exist_are_finite_and_within_bounds(value: float, name: str) -> None:
    try:
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequestError as refusal:
        param = refusal.param
    else:
        param = None
        low, high = BOUNDS[name]
        assert low <= getattr(params, name) <= high
    assert param in (None, name)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)]
)
def test_temperatures_below_a_hundred_thousandth_are_greedy(
    temperature: float, is_greedy: bool
) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_the_number_of_stop_tokens_is_bounded() -> None:
    most = tuple(range(MAX_STOP_TOKEN_IDS))
    assert SamplingParams(stop_token_ids=most).stop_token_ids == most
    assert refused_param(stop_token_ids=(*most, 1)) == "stop_token_ids"


@pytest.mark.parametrize("ids", [5, None, "12", (1.5,), ("1",), (True,), (None,), (math.nan,)])
def test_stop_tokens_that_are_no_whole_numbers_are_refused_by_name(ids: object) -> None:
    assert refused_param(stop_token_ids=ids) == "stop_token_ids"


@pytest.mark.parametrize("value", ["yes", 1, None, 0.0])
def test_a_switch_that_is_neither_true_nor_false_is_refused_by_name(value: object) -> None:
    assert refused_param(ignore_eos=value) == "ignore_eos"


def test_requests_and_params_are_frozen() -> None:
    request = Request(prompt_token_ids=(1, 2))
    with pytest.raises(AttributeError):
        request.cache_salt = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        request.params.top_k = 3  # type: ignore[misc]
