"""Bounds of the engine's options: a config that exists is within them, a refusal names the flag.

What else may be given in place of a value: `tests/faces/test_hostile_values.py`. That every valid
one reaches the engine process: `tests/engine/process/test_start_message.py`.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from cadenza.config import EngineConfig, EngineLimits
from cadenza.errors import ConfigError

BOUNDS: dict[str, tuple[int, int]] = {
    "max_num_seqs": (1, 2**14),
    "max_model_len": (1, 2**24),
    "max_num_batched_tokens": (1, 2**24),
    "kv_cache_memory_bytes": (1, 2**60),
    "num_pages": (1, 2**31),
    "max_num_queued_reqs": (1, 2**31),
    "seed": (0, 2**63 - 1),
    "page_size": (16, 2**16),
}
NOT_WHOLE = (math.nan, math.inf, -math.inf, True, False, "16", 16.0, [16], b"16")
NOT_REAL = (-0.1, math.nan, math.inf, 10**400, True, "1", None)
NOT_CHOSEN = ("", "AUTO", None, 1, True, ["auto"])
REFUSED: dict[str, tuple[Any, ...]] = {
    **{
        name: (low - 1, high + 1, 2**63, -(2**63), 10**400, *NOT_WHOLE)
        for name, (low, high) in BOUNDS.items()
    },
    "prefix_cache_disk_bytes": (0, -1, 1 << 19, 10**400, True, "1"),
    "max_itl_ms": (0, -1, 0.5, 10**400, math.nan, math.inf, True, "50", "", None),
    "prefix_cache_memory_share": (1.1, *NOT_REAL),
    "starvation_guard": (0, -1, *NOT_REAL),
    "prefix_cache_disk": ("", "a\0b", "a\nb", b"folder", 5, True),
}
CHOICES = ("dtype", "kv_layout", "scheduler", "batching", "scheduling_policy", "admission")


def refusal_of(**options: object) -> str:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)  # type: ignore[arg-type]
    return str(refusal.value)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_defaults_and_both_bounds_of_an_option_are_allowed() -> None:
    assert EngineConfig() == EngineConfig()
    for name, bounds in BOUNDS.items():
        for bound in bounds:
            assert getattr(EngineConfig(**{name: bound}), name) == bound  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_the_wrong_size_or_type_is_refused_by_its_flag(name: str) -> None:
    for value in REFUSED[name]:
        assert flag(name) in refusal_of(**{name: value}), value


def test_a_share_says_its_bounds() -> None:
    assert "must be a share from 0 to 1" in refusal_of(prefix_cache_memory_share=1.1)


def test_a_page_size_that_is_no_multiple_of_sixteen_is_refused() -> None:
    for page_size in (17, 24, 31, 100):
        assert "--page-size" in refusal_of(page_size=page_size)


def test_an_unknown_choice_is_refused_and_the_known_ones_are_named() -> None:
    for name in CHOICES:
        for value in NOT_CHOSEN:
            message = refusal_of(**{name: value})
            assert flag(name) in message
            assert repr(getattr(EngineConfig(), name)).strip("'") in message


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError):
        EngineConfig(max_num_sequences=3)  # type: ignore[call-arg]


def limits_of(**changes: int) -> EngineLimits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 4,
        "max_model_len": 33,
        "page_size": 16,
        "num_pages": 8,
        "max_num_queued_reqs": 4,
    }
    return EngineLimits(**(values | changes))


def test_a_token_budget_below_the_number_of_rows_is_refused_with_both_numbers() -> None:
    limits_of()
    with pytest.raises(ConfigError, match=r"tokens 3 is below --max-num-seqs 4"):
        limits_of(max_num_batched_tokens=3)


def test_a_sequence_never_has_more_pages_than_the_context_fills() -> None:
    for max_model_len, num_pages in ((1, 1), (16, 1), (17, 2), (33, 3)):
        assert limits_of(max_model_len=max_model_len).max_pages_per_seq == num_pages


def test_a_bound_on_steps_is_a_time_or_a_word() -> None:
    for value in ("auto", "none", 1, 62.5, 600_000):
        assert EngineConfig(max_itl_ms=value).max_itl_ms == value


def test_a_folder_may_be_a_path() -> None:
    assert EngineConfig(prefix_cache_disk=Path("a/b")).prefix_cache_disk == str(Path("a/b"))  # type: ignore[arg-type]
