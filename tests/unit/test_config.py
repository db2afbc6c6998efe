"""Bounds of the engine's options: a config that exists is within them, a refusal names the flag."""

import math
from pathlib import Path

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
CHOICES = ("dtype", "kv_layout", "scheduler", "batching", "scheduling_policy", "admission")


def refusal_of(**options: object) -> str:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)  # type: ignore[arg-type]
    return str(refusal.value)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_defaults_are_within_bounds() -> None:
    EngineConfig()


@pytest.mark.parametrize("name", BOUNDS)
def test_both_bounds_of_an_option_are_allowed(name: str) -> None:
    for bound in BOUNDS[name]:
        assert getattr(EngineConfig(**{name: bound}), name) == bound  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_past_a_bound_is_refused_by_its_flag(name: str) -> None:
    low, high = BOUNDS[name]
    for value in (low - 1, high + 1, 2**63, -(2**63), 10**400):
        assert flag(name) in refusal_of(**{name: value})


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, False, "16", 16.0, [16], b"16"], ids=repr
)
@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_no_whole_number_is_refused_by_its_flag(name: str, value: object) -> None:
    assert flag(name) in refusal_of(**{name: value})


@pytest.mark.parametrize("page_size", [17, 24, 31, 100])
def test_a_page_size_that_is_no_multiple_of_sixteen_is_refused(page_size: int) -> None:
    assert "--page-size" in refusal_of(page_size=page_size)


@pytest.mark.parametrize("value", ["", "AUTO", None, 1, True, ["auto"]], ids=repr)
@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_refused_and_the_known_ones_are_named(
    name: str, value: object
) -> None:
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


@pytest.mark.parametrize(("max_model_len", "num_pages"), [(1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_sequence_never_has_more_pages_than_the_context_fills(
    max_model_len: int, num_pages: int
) -> None:
    assert limits_of(max_model_len=max_model_len).max_pages_per_seq == num_pages


@pytest.mark.parametrize("value", ["auto", "none", 1, 62.5, 600_000])
def test_a_bound_on_steps_is_a_time_or_a_word(value: float | str) -> None:
    assert EngineConfig(max_itl_ms=value).max_itl_ms == value


@pytest.mark.parametrize("value", [0, -1, 0.5, 10**400, math.nan, math.inf, True, "50", "", None])
def test_any_other_bound_on_steps_is_refused_by_its_flag(value: object) -> None:
    assert "--max-itl-ms" in refusal_of(max_itl_ms=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, 10**400, True, "1", None])
def test_a_share_of_the_cache_that_is_none_is_refused_by_its_flag(value: object) -> None:
    said = refusal_of(prefix_cache_memory_share=value)
    assert "--prefix-cache-memory-share" in said
    assert "must be a share from 0 to 1" in said


@pytest.mark.parametrize("value", ["", "a\0b", "a\nb", b"folder", 5, True])
def test_a_folder_that_is_none_is_refused_by_its_flag(value: object) -> None:
    assert "--prefix-cache-disk" in refusal_of(prefix_cache_disk=value)


def test_a_folder_may_be_a_path() -> None:
    assert EngineConfig(prefix_cache_disk=Path("a/b")).prefix_cache_disk == str(Path("a/b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1 << 19, 10**400, True, "1"])
def test_a_bound_on_a_folder_that_is_none_is_refused_by_its_flag(value: object) -> None:
    assert "--prefix-cache-disk-bytes" in refusal_of(prefix_cache_disk_bytes=value)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**400, True, "1", None])
def test_a_guard_that_is_no_time_is_refused_by_its_flag(value: object) -> None:
    assert "--starvation-guard" in refusal_of(starvation_guard=value)
