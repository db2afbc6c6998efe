"""Ctrl-C while `LLM.generate` runs: never dropped, and the caller's handler is as it was."""

import gc
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import pytest

from cadenza import LLM, SamplingParams
from cadenza.frontend.llm import KeptInterrupts

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@contextmanager
def pressed_in_the_collector() -> Generator[list[str]]:
    """Ctrl-C within a callback of the garbage collector, where Python drops what it raises, once
    another handler is in place."""
    pressed: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def press(phase: str, _: object) -> None:
        if not pressed and signal.getsignal(signal.SIGINT) is not before:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)

    thresholds = gc.get_threshold()
    gc.callbacks.append(press)
    gc.set_threshold(10)
    try:
        yield pressed
    finally:
        gc.callbacks.remove(press)
        gc.set_threshold(*thresholds)


@contextmanager
def handled_by(handler: object) -> Generator[None]:
    previous = signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        assert signal.getsignal(signal.SIGINT) is handler, "it was not restored"
        signal.signal(signal.SIGINT, previous)


def test_an_interrupt_within_the_collector_ends_generate(llm: LLM):
    expected = llm.generate([[1, 2, 3]], PARAMS)
    with (
        handled_by(signal.default_int_handler),
        pressed_in_the_collector() as pressed,
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate([[1, 2, 3]] * 3, PARAMS)
    assert pressed
    assert [each.outputs for each in llm.generate([[1, 2, 3]], PARAMS)] == [
        each.outputs for each in expected
    ]


def test_the_callers_own_handler_is_called_once_and_generation_goes_on(llm: LLM):
    calls: list[tuple[int, bool]] = []

    def note(number: int, frame: FrameType | None) -> None:
        calls.append((number, frame is not None))

    with handled_by(note), pressed_in_the_collector():
        (output,) = llm.generate([[1, 2, 3]], PARAMS)
    assert calls == [(signal.SIGINT, True)]
    assert len(output.outputs[0].token_ids) == 40


def test_generate_on_another_thread_leaves_signals_alone(llm: LLM):
    done: list[int] = []

    def generate() -> None:
        done.append(len(llm.generate([[1, 2, 3]], PARAMS)))

    with handled_by(signal.default_int_handler):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join(60)
    assert done == [1]


def test_the_second_interrupt_is_the_callers_at_once():
    calls: list[int] = []
    with handled_by(lambda number, _: calls.append(number)):
        with KeptInterrupts() as kept:
            signal.raise_signal(signal.SIGINT)
            assert (calls, kept.is_set) == ([], True)
            signal.raise_signal(signal.SIGINT)
            assert calls == [signal.SIGINT]
            kept.deliver()
            assert calls == [signal.SIGINT] * 2
            kept.deliver()
        assert calls == [signal.SIGINT] * 2


def test_an_interrupt_after_the_last_step_is_the_callers():
    def pressed() -> None:
        with KeptInterrupts():
            signal.raise_signal(signal.SIGINT)

    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        pressed()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_ctrl_c_is_ignored_or_ends_the_process_it_still_does(handler: signal.Handlers):
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with KeptInterrupts():
            assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, previous)
