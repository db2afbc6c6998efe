"""Which tokens of a prompt are kept, and where they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.errors import InvalidRequestError
from cadenza.sparse_prefill import (
    CHUNK,
    LAST_TOKENS,
    PromptSpan,
    SparsePrefill,
    chunk_scores,
    kept_of_mask,
    num_chunks,
)


@given(
    num_tokens=st.integers(1, 2000),
    keep=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
    start=st.integers(0, 2000),
)
def test_kept_tokens_are_as_many_as_was_said_before_and_have_their_own_indices(
    num_tokens: int, keep: float, seed: int, start: int
) -> None:
    sparse = SparsePrefill(keep=keep, forced=(PromptSpan(start, start + 40),))
    scores = [float((chunk * 7 + seed) % 5) for chunk in range(num_chunks(num_tokens))]
    kept = sparse.select(scores, num_tokens)
    prompt = tuple(range(1000, 1000 + num_tokens))
    own = kept.of_prompt(prompt)
    assert len(own) == kept.num_tokens == sparse.num_kept_tokens(num_tokens)
    indices = kept.indices(0, kept.num_tokens + 3)
    assert tuple(prompt[index] for index in indices[:-3]) == own
    assert indices[-3:] == [num_tokens, num_tokens + 1, num_tokens + 2]
    assert {*range(num_tokens)[-LAST_TOKENS:], 0} <= set(indices)
    assert set(range(num_tokens)[start : start + 40]) <= set(indices)
    assert indices[: kept.num_dense] == list(range(kept.num_dense))
    for index in {0, num_tokens // 3, num_tokens // 2, num_tokens - 1, num_tokens + 1}:
        first = kept.first_position_from(index)
        assert indices[first] >= index
        assert first == 0 or indices[first - 1] < index
    assert kept_of_mask(kept.mask, num_tokens) == kept


def test_everything_is_kept_at_1() -> None:
    kept = SparsePrefill(keep=1.0).select([0.0] * 4, 100)
    assert kept.num_skipped == 0
    assert kept.num_dense == 100
    assert kept.indices(0, 101) == [*range(101)]


def test_the_highest_scores_are_kept_and_of_equal_ones_the_earlier() -> None:
    sparse = SparsePrefill(keep=0.5)
    scores = [0.0, 2.0, 1.0, 2.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert sparse.select(scores, 10 * CHUNK).chunks == (0, 1, 4, 8, 9)


def test_forced_chunks_beyond_the_rate_are_all_that_is_kept() -> None:
    sparse = SparsePrefill(keep=0.1, forced=(PromptSpan(0, 5 * CHUNK - 1),))
    assert sparse.select([9.0] * 10, 10 * CHUNK).chunks == (0, 1, 2, 3, 4, 8, 9)


def test_scores_of_chunks_are_means_and_those_that_are_not_finite_are_refused() -> None:
    assert chunk_scores([1.0] * CHUNK + [2.0, 4.0], CHUNK + 2) == [1.0, 3.0]
    with pytest.raises(ValueError, match="not finite"):
        chunk_scores([float("nan")], 1)


@pytest.mark.parametrize("mask", [b"", b"\x01", b"\x00\x04", b"\xff\x0f", b"\x01\x04\x00"])
def test_a_mask_of_another_prompt_is_refused(mask: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="must be what an answer"):
        kept_of_mask(mask, 11 * CHUNK)


@pytest.mark.parametrize(
    "wrong", [{"keep": 0.0}, {"keep": 1.5}, {"keep": 0.5, "forced": ((4, 4),)}]
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        SparsePrefill(**wrong)  # pyright: ignore[reportArgumentType]
