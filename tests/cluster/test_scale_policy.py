"""How many engines a load needs: a function of what waits and of the KV in use."""

import pytest

from cadenza.cluster.scale_policy import EngineDemand, ScaleOptions, wanted_replicas
from cadenza.errors import ConfigError

OPTIONS = ScaleOptions(min_replicas=1, max_replicas=8, ttft_goal_s=2.0, quiet_s=600.0)


def demands(*queued_s: float, kv: float = 0.5) -> list[EngineDemand]:
    return [EngineDemand(queued_s=each, kv_usage=kv) for each in queued_s]


def wanted(*queued_s: float, kv: float = 0.5, current: int | None = None) -> int:
    now = len(queued_s) if current is None else current
    return wanted_replicas(OPTIONS, demands(*queued_s, kv=kv), now, 0.0, None)[0]


def test_prompts_that_wait_beyond_the_goal_have_engines_added_up_to_twice_as_many() -> None:
    assert wanted(1.9, 1.9) == 2
    assert wanted(2.1, 2.1) == 3
    assert wanted(4.0, 1.0) == 3
    assert wanted(3.0, 3.0, 3.0) == 5
    assert wanted(100.0, 100.0) == 4
    assert wanted(*[100.0] * 6) == 8
    assert wanted(*[100.0] * 8) == 8


def test_full_kv_has_one_added_whatever_waits() -> None:
    assert wanted(0.0, 0.0, kv=0.9) == 2
    assert wanted(0.0, 0.0, kv=0.91) == 3


def test_nothing_changes_while_some_still_load() -> None:
    assert wanted(100.0, 100.0, current=4) == 4
    assert wanted(current=2) == 2
    assert wanted_replicas(OPTIONS, demands(0.0), 2, 9e9, 0.0) == (2, None)


def play(readings: list[tuple[float, list[EngineDemand]]], current: int) -> list[int]:
    """What is wanted at each time, each time of as many as were wanted before."""
    found, since_s = [current], None
    for now_s, reading in readings:
        count, since_s = wanted_replicas(OPTIONS, reading, found[-1], now_s, since_s)
        found.append(count)
    return found[1:]


def test_one_goes_after_ten_quiet_minutes_and_the_next_after_ten_more() -> None:
    quiet = [(60.0 * minute, demands(0.3, 0.3, 0.3)) for minute in range(32)]
    assert play(quiet, 3) == [3] * 10 + [2] * 10 + [1] * 12


def test_a_moment_that_is_not_quiet_begins_the_ten_minutes_anew() -> None:
    readings = [(60.0 * minute, demands(0.3, 0.3)) for minute in range(16)]
    readings[8] = (480.0, demands(0.5, 0.5))
    assert play(readings, 2) == [2] * 16


def test_none_goes_whose_kv_would_not_fit_into_the_others() -> None:
    full = [(60.0 * minute, demands(0.0, 0.0, kv=0.5)) for minute in range(30)]
    assert set(play(full, 2)) == {2}
    fits = [(60.0 * minute, demands(0.0, 0.0, kv=0.4)) for minute in range(30)]
    assert play(fits, 2)[-1] == 1


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_replicas 3 must be from 1 to 2"):
        ScaleOptions(min_replicas=3, max_replicas=2)
    with pytest.raises(ConfigError, match="ttft_goal_s 0 must be above 0"):
        ScaleOptions(min_replicas=1, max_replicas=2, ttft_goal_s=0)
    with pytest.raises(ConfigError, match="max_kv_usage 90 must be"):
        ScaleOptions(min_replicas=1, max_replicas=2, max_kv_usage=90)
