"""Which tokens of a prompt are kept, where they are, and the gain that is predicted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.step_cost import StepCost
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.loading.draft import cost_of_shape, cost_of_steps, refuse_loss, sparse_gain
from cadenza.models.model_config import ModelConfig
from cadenza.sparse_prefill import (
    CHUNK,
    LAST_TOKENS,
    PromptSpan,
    SparsePrefill,
    SpecPrefillConfig,
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


TARGET = named_shape("llama-3.2-1b")
SMALL = replace(named_shape("smollm2-135m"), vocab_size=TARGET.vocab_size)
QUARTER = replace(TARGET, num_layers=TARGET.num_layers // 4)


def gain(draft: ModelConfig, num_tokens: int, keep: float, rate: float = 0.4) -> float:
    target = cost_of_shape(TARGET, rate)
    return sparse_gain(target, cost_of_shape(draft, rate), num_tokens, keep)


@pytest.mark.parametrize(
    ("draft", "rate", "keep", "meant"),
    [
        (SMALL, 1.0, 0.3, (2.3, 2.2, 1.9, 1.7)),
        (SMALL, 0.4, 0.3, (2.2, 2.0, 1.8, 1.7)),
        (SMALL, 1.0, 0.1, (4.0, 3.6, 2.6, 2.1)),
        (SMALL, 0.4, 0.1, (3.4, 2.9, 2.2, 2.0)),
        (QUARTER, 0.4, 0.3, (2.0, 2.2, 2.5, 2.8)),
    ],
    ids=str,
)
def test_the_gain_is_that_of_the_formula(
    draft: ModelConfig, rate: float, keep: float, meant: tuple[float, ...]
):
    """The figures are those of n L_T + n²/2 A_T / e over n L_D + n²/2 A_D / e + k n L_T +
    (k n)²/2 A_T / e, by hand, to one digit."""
    lengths = (4096, 8192, 32_768, 131_072)
    found = [gain(draft, length, keep, rate) for length in lengths]
    assert found == pytest.approx(meant, abs=0.07)


def test_a_wider_head_counts_for_the_look_ahead_alone():
    narrow = replace(SMALL, vocab_size=49_152)
    assert 1.0 < gain(narrow, 512, 0.3) / gain(SMALL, 512, 0.3) < 1.02
    assert gain(narrow, 32_768, 0.3) == pytest.approx(gain(SMALL, 32_768, 0.3), rel=1e-3)


def test_layers_with_a_window_attend_to_no_more_and_so_gain_less_from_what_is_left_out():
    kinds = tuple(replace(kind, window=1024) for kind in TARGET.layer_pattern)
    windowed = cost_of_shape(replace(TARGET, layer_pattern=kinds))
    draft = cost_of_shape(QUARTER)
    assert windowed.prompt(1024) == cost_of_shape(TARGET).prompt(1024)
    assert sparse_gain(windowed, draft, 32_768, 0.3) < 0.8 * gain(QUARTER, 32_768, 0.3)


def test_a_copy_of_the_model_loses_and_is_refused_unless_it_is_forced():
    assert gain(TARGET, 8192, 0.3) < 1.0
    config = SpecPrefillConfig(threshold=8192, keep=0.3)
    with pytest.raises(ConfigError, match=r"predicted to take .* times as long"):
        refuse_loss(TARGET, TARGET, config)
    refuse_loss(TARGET, TARGET, replace(config, force=True))
    refuse_loss(TARGET, SMALL, config)
    with pytest.raises(ConfigError, match="lower keep"):
        refuse_loss(TARGET, SMALL, replace(config, keep=0.95))


def test_measured_steps_give_the_same_formula_in_milliseconds():
    target = cost_of_steps(StepCost(fixed_ms=4, token_ms=2, logit_ms=1, key_ms=0.001), 100)
    draft = cost_of_steps(StepCost(fixed_ms=1, token_ms=0.2, logit_ms=0.1, key_ms=0.0005), 50)
    whole = 10 * 4 + 1000 * 2 + 1000 * 1001 / 2 * 0.001
    scored = 20 * 1 + 1000 * 0.2 + 1000 * 1001 / 2 * 0.0005
    ahead = 7 * (1 + 0.2 + 0.1 + 1000 * 0.0005)
    kept = 3 * 4 + 300 * 2 + 300 * 301 / 2 * 0.001
    found = sparse_gain(target, draft, 1000, 0.3)
    assert found == pytest.approx(whole / (scored + ahead + kept))
