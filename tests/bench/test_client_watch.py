"""What a client adds to latencies, from times given by hand."""

from collections.abc import Callable, Sequence

import pytest

from cadenza.bench.serve import WatchedSelector


def readings(values: Sequence[float]) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left)


def test_the_lag_is_of_wake_ups_and_of_the_time_in_which_no_socket_is_read():
    # Started, then twice (asked, woken), and read; the second wait ends 4 ms too late.
    clock = readings([0.0, 0.2, 0.3, 0.4, 0.4 + 0.001 + 0.004, 0.505])
    with WatchedSelector(clock, readings([7.0, 7.25])) as watch:
        watch.select(0)
        watch.select(0.0004)
        found = watch.read()
    assert found.elapsed_s == pytest.approx(0.505)
    assert found.cpu_s == 0.25
    assert found.longest_busy_s == pytest.approx(0.2)
    # Busy for 0.2 s, 0.1 s and 0.1 s: half of the squares, over the whole time.
    assert found.lag_s == pytest.approx(0.004 + (0.04 + 0.01 + 0.01) / 2 / 0.505)


def test_a_restart_forgets_what_was_before():
    clock = readings([0.0, 5.0, 5.0, 6.0, 6.5, 6.5, 7.0])
    with WatchedSelector(clock, readings([0.0, 1.0, 1.5])) as watch:
        watch.select(0)
        watch.restart()
        watch.select(0)
        found = watch.read()
    assert (found.elapsed_s, found.cpu_s, found.longest_busy_s) == (1.0, 0.5, 0.5)
    assert found.lag_s == pytest.approx(0.25)
