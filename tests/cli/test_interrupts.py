"""Ctrl-C in a command ends it with 130, also where Python drops what a handler raises."""

import gc
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from cadenza.cli import INTERRUPTED, main
from cadenza.cli.interrupts import dropped_interrupts_raised


def press_in_the_collector() -> None:
    """Ctrl-C within a callback of the garbage collector, as JAX has one."""

    def press(phase: str, _: object) -> None:
        gc.callbacks.remove(press)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(press)


class Finalised:
    """Ctrl-C within a finaliser."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def press_in_a_finaliser() -> None:
    Finalised()


@pytest.mark.parametrize("press", [press_in_the_collector, press_in_a_finaliser])
def test_an_interrupt_that_python_drops_is_raised_again(press: Callable[[], None]):
    def wait() -> None:
        with dropped_interrupts_raised():
            press()
            gc.collect()
            threading.Event().wait(10)

    with pytest.raises(KeyboardInterrupt):
        wait()


def test_other_exceptions_that_are_dropped_are_reported_as_before():
    reported: list[object] = []
    previous, sys.unraisablehook = sys.unraisablehook, reported.append
    try:
        with dropped_interrupts_raised():

            def fail(_phase: str, _: object) -> None:
                gc.callbacks.remove(fail)
                raise ValueError

            gc.callbacks.append(fail)
            gc.collect()
        assert len(reported) == 1
        assert sys.unraisablehook == reported.append
    finally:
        sys.unraisablehook = previous


def test_a_benchmark_that_is_interrupted_within_the_collector_exits_with_130():
    cost = ("--step-cost", "5.4,0.25,0.1,0.00002", "--policies", "fcfs")
    press_in_the_collector()
    assert main(["bench", "simulate", *cost, "--num-requests", "1000000"]) == INTERRUPTED
