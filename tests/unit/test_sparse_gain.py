"""The predicted gain of sparse prefill, against figures worked out by hand, and what it refuses."""

from dataclasses import replace

import pytest

from cadenza.batch.step_cost import StepCost
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import ConfigError
from cadenza.loading.draft import (
    cost_of_shape,
    cost_of_steps,
    refuse_loss,
    sparse_gain,
)
from cadenza.models.model_config import ModelConfig
from cadenza.sparse_prefill import SpecPrefillConfig

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
