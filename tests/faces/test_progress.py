"""The progress line: what it says, when it is drawn, and that nothing is written elsewhere."""

import gc
import io
import re
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from types import FrameType
from typing import cast

import pytest
from rich.console import Console

from cadenza import LLM, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.frontend.llm import KeptInterrupts
from cadenza.frontend.progress import (
    BAR_WIDTH,
    EVERY_S,
    FIRST_S,
    BatchProgress,
    ProgressLine,
    progress_line,
)

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


class TickingClock:
    """Each reading is `step_s` later than the one before."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def strip(text: str) -> str:
    """Without the codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def console_of(screen: Screen) -> Console:
    return Console(
        file=screen, force_terminal=True, width=100, color_system=None, legacy_windows=False
    )


def test_the_line_tells_what_is_done_the_rows_and_the_speed():
    progress = BatchProgress(
        num_done=12, num_requests=64, num_rows=16, num_tokens=500, elapsed_s=2.0
    )
    assert progress.text == "12/64 done, 16 rows, 250.0 tok/s"
    nothing = BatchProgress(num_done=0, num_requests=3, num_rows=1, num_tokens=0, elapsed_s=9.0)
    assert nothing.text == "0/3 done, 1 row"


def test_the_line_is_drawn_late_and_seldom_and_is_gone_at_the_end():
    screen, clock = Screen(), TickingClock(0.0)
    with ProgressLine(64, console_of(screen), clock) as line:
        for now_s, is_drawn in (
            (FIRST_S / 2, False),
            (FIRST_S, True),
            (FIRST_S + EVERY_S / 2, False),
            (FIRST_S + 2 * EVERY_S, True),
        ):
            clock.now_s = now_s
            before = screen.getvalue()
            assert line.is_due is is_drawn
            line.show(num_done=3, num_rows=4, num_tokens=100)
            assert (screen.getvalue() != before) is is_drawn
    assert "3/64 done, 4 rows, 200.0 tok/s" in screen.getvalue()
    last = screen.getvalue().rpartition("done")[2]
    assert "\x1b[2K" in last, "the line is erased at the end"


def test_llm_shows_the_line_on_a_terminal_unless_it_is_not_wanted(llm: LLM):
    long = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
    prompts, screens = [[1], [2, 3]] * 8, (Screen(), Screen())
    while not screens[0].getvalue():
        for screen, is_wanted in zip(screens, (True, False), strict=True):
            with redirect_stderr(screen):
                llm.generate(prompts, long, use_tqdm=is_wanted)
    assert "/16 done, 4 rows" in screens[0].getvalue()
    assert screens[1].getvalue() == ""
    with redirect_stderr(screens[1]):
        llm.generate(prompts, long, progress=False)
    assert screens[1].getvalue() == ""


def test_the_line_begins_with_a_bar_of_what_is_done():
    screen, clock = Screen(), TickingClock(FIRST_S)
    with ProgressLine(4, console_of(screen), clock) as line:
        line.show(num_done=2, num_rows=2, num_tokens=10)
    bars = re.findall(r"([━╸╺ ]{24}) +2/4 done", strip(screen.getvalue()))
    assert {each.strip() for each in bars} == {"━" * (BAR_WIDTH // 2)}


class KeptBar:
    """A bar of tqdm's kind, which keeps what is asked of it."""

    def __init__(self, **settings: object) -> None:
        self.settings, self.calls, self.postfix = settings, list[object](), settings["postfix"]

    def update(self, n: int) -> None:
        self.calls.append(n)

    def close(self) -> None:
        self.calls.append("close")


def test_use_tqdm_takes_what_makes_a_bar_as_vllm_does(llm: LLM):
    made: list[KeptBar] = []

    def make(**settings: object) -> KeptBar:
        made.append(KeptBar(**settings))
        return made[-1]

    expected = llm.generate([[1], [2, 3], [4]], PARAMS, use_tqdm=False)
    again = llm.generate([[1], [2, 3], [4]], PARAMS, use_tqdm=make)
    assert [each.outputs[0].token_ids for each in again] == [
        each.outputs[0].token_ids for each in expected
    ]
    (bar,) = made
    assert (bar.settings["total"], bar.settings["desc"]) == (3, "Processed prompts")
    *moved, closed = bar.calls
    assert (sum(cast(list[int], moved)), closed) == (3, "close")
    assert str(bar.postfix).endswith(" tok/s")
    llm.generate([[1]], PARAMS, use_tqdm=make, progress=False)
    assert len(made) == 1


def test_use_tqdm_of_another_type_is_refused(llm: LLM):
    with pytest.raises(InvalidRequestError, match="use_tqdm is 'yes'"):
        llm.generate([[1]], PARAMS, use_tqdm="yes")  # pyright: ignore[reportArgumentType]


def test_there_is_no_line_where_stderr_is_piped():
    with redirect_stderr(Screen()):
        assert progress_line(3).has_terminal
        assert not progress_line(3, is_wanted=False).has_terminal
    with redirect_stderr(io.StringIO()):
        assert not progress_line(3).has_terminal
    late = ProgressLine(3, None, TickingClock(1e9))
    late.show(num_done=1, num_rows=1, num_tokens=1)
    assert not late.is_due


def test_a_process_without_stderr_has_no_line(llm: LLM):
    with redirect_stderr(None):
        assert sys.stderr is None
        assert len(llm.generate([[1], [2]], PARAMS)) == 2


TO_INTERRUPT = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


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
    expected = llm.generate([[1, 2, 3]], TO_INTERRUPT)
    with (
        handled_by(signal.default_int_handler),
        pressed_in_the_collector() as pressed,
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate([[1, 2, 3]] * 3, TO_INTERRUPT)
    assert pressed
    assert [each.outputs for each in llm.generate([[1, 2, 3]], TO_INTERRUPT)] == [
        each.outputs for each in expected
    ]


def test_the_callers_own_handler_is_called_once_and_generation_goes_on(llm: LLM):
    calls: list[tuple[int, bool]] = []

    def note(number: int, frame: FrameType | None) -> None:
        calls.append((number, frame is not None))

    with handled_by(note), pressed_in_the_collector():
        (output,) = llm.generate([[1, 2, 3]], TO_INTERRUPT)
    assert calls == [(signal.SIGINT, True)]
    assert len(output.outputs[0].token_ids) == 40


def test_generate_on_another_thread_leaves_signals_alone(llm: LLM):
    done: list[int] = []

    def generate() -> None:
        done.append(len(llm.generate([[1, 2, 3]], TO_INTERRUPT)))

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
