"""`BatchRun` over the token-storing runner and a clock that the test turns, and its frames."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.cli.batch_run import BatchRun, Question, whole_text
from cadenza.cli.generate import report_failures, run_as_json, run_as_text
from cadenza.cli.generate_view import frame, json_lines, live_view, print_result
from cadenza.cli.interrupts import Interrupts
from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.errors import InvalidRequestError, RunnerError
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, OutputPart
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.server.dialects import sample

STEP_S = 0.5
VOCAB = 260


class Ticking:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def text(model: Path) -> TextFrontend:
    return TextFrontend(open_checkpoint(model))


class BrokenRunner(FakeRunner):
    """Fails every step."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        raise RunnerError("broken on purpose")


def new_core(
    max_num_seqs: int = 4, max_num_queued_reqs: int = 8, kind: type[FakeRunner] = FakeRunner
) -> EngineCore:
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=128,
        page_size=16,
        num_pages=8 * max_num_seqs,
        max_num_queued_reqs=max_num_queued_reqs,
    )
    runner = kind(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=16,
        vocab_size=VOCAB,
    )
    return EngineCore(runner, limits)


def ask(index: int, max_tokens: int = 5, size: int = 3, shown: str = "") -> Question:
    ids = tuple((index * 7 + position) % VOCAB for position in range(size))
    request = Request(
        prompt_token_ids=ids, params=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )
    prepared = PreparedRequest(text=None, request=request)
    return Question(shown=shown or f"prompt {index}", prepared=prepared)


def finish(run: BatchRun, clock: Ticking) -> None:
    while not run.is_done:
        clock.now_s += STEP_S
        run.step()


def test_times_are_those_of_the_clock(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(), text, [ask(0), ask(1, max_tokens=1)], clock)
    finish(run, clock)
    first, second = run.streams
    # The overlapped loop launches in the first step and reads in the second.
    assert (first.ttft_s, first.elapsed_s) == (2 * STEP_S, 6 * STEP_S)
    assert first.tokens_per_s == pytest.approx(4 / (4 * STEP_S))
    assert (second.num_tokens, second.ttft_s, second.tokens_per_s) == (1, 2 * STEP_S, None)
    assert run.elapsed_s == 6 * STEP_S
    clock.now_s += 99
    assert run.elapsed_s == 6 * STEP_S
    assert run.tokens_per_s == pytest.approx(6 / (6 * STEP_S))


def test_rows_and_states_follow_the_scheduler(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(max_num_seqs=2), text, [ask(0), ask(1, size=40), ask(2)], clock)
    run.step()
    assert [stream.state for stream in run.streams] == ["reading", "reading", "waiting"]
    assert [stream.row for stream in run.streams] == [0, 1, None]
    run.step()
    assert run.streams[0].state == "writing"
    finish(run, clock)
    assert [stream.state for stream in run.streams] == ["done"] * 3
    assert run.streams[2].row == 0


def test_more_questions_than_the_queue_holds_are_all_answered(text: TextFrontend):
    clock = Ticking()
    core = new_core(max_num_seqs=2, max_num_queued_reqs=1)
    run = BatchRun(core, text, [ask(index) for index in range(9)], clock)
    finish(run, clock)
    assert [stream.num_tokens for stream in run.streams] == [5] * 9
    assert core.is_idle
    core.check_invariants()


def test_a_question_that_cannot_be_served_starts_none(text: TextFrontend):
    core = new_core()
    with pytest.raises(InvalidRequestError):
        BatchRun(core, text, [ask(0), ask(1, max_tokens=1000)], Ticking())
    assert core.is_idle


def test_closing_cancels_what_runs_and_keeps_what_has_come(text: TextFrontend):
    core = new_core(max_num_seqs=1)
    run = BatchRun(core, text, [ask(0, max_tokens=50), ask(1)], Ticking())
    for _ in range(4):
        run.step()
    run.close()
    assert run.is_done
    assert run.streams[0].num_tokens == 3
    assert run.streams[0].completions[0].finish_reason == "abort"
    while not core.is_idle:
        assert core.step() == []
    core.check_invariants()


def test_json_of_a_run_is_one_line_for_each_stream_and_a_summary(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(), text, [ask(0), ask(1)], clock)
    finish(run, clock)
    lines = json_lines(run, {"model": "m"})
    assert len(lines) == 3
    assert '"ttft_s": 1.0' in lines[0]
    assert '"model": "m"' in lines[-1]


class PressedLater(Interrupts):
    """Ctrl-C between two steps, after so many of them."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._steps = iter(range(num_steps))

    @property
    def is_set(self) -> bool:
        return next(self._steps, None) is None

    @is_set.setter
    def is_set(self, value: bool) -> None:
        del value


def interrupted_run(text: TextFrontend) -> BatchRun:
    """One short prompt, one long one, and one that waits for a row."""
    core = new_core(max_num_seqs=2, max_num_queued_reqs=2)
    questions = [ask(0, max_tokens=2), ask(1, max_tokens=100), ask(2, max_tokens=100)]
    questions += [ask(3), ask(4), ask(5)]
    return BatchRun(core, text, questions, Ticking())


def test_ctrl_c_prints_what_json_there_is(text: TextFrontend, capsys: pytest.CaptureFixture[str]):
    run = interrupted_run(text)
    with pytest.raises(KeyboardInterrupt):
        run_as_json(run, PressedLater(6), {"model": "m"})
    *found, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["finish_reason"] for each in found[:3]] == ["length", "abort", "abort"]
    assert [len(each["token_ids"]) for each in found[:2]] == [2, 5]
    assert summary["num_generated_tokens"] == sum(len(each["token_ids"]) for each in found)


def test_ctrl_c_prints_the_text_of_answers_that_had_begun(
    text: TextFrontend, capsys: pytest.CaptureFixture[str]
):
    run = interrupted_run(text)
    with pytest.raises(KeyboardInterrupt):
        run_as_text(run, PressedLater(6))
    out = capsys.readouterr().out
    headings = re.findall(r"^\[(\d)\] prompt", out, flags=re.MULTILINE)
    begun = [str(stream.index + 1) for stream in run.streams if stream.text]
    assert headings == begun
    assert {"1", "2"} <= set(begun) < {"1", "2", "3", "4", "5", "6"}
    assert run.streams[1].text.rstrip("\n") in out


def test_a_stream_that_fails_is_said_on_stderr_and_fails_the_command(
    text: TextFrontend, capsys: pytest.CaptureFixture[str]
):
    clock = Ticking()
    run = BatchRun(new_core(kind=BrokenRunner), text, [ask(0), ask(1)], clock)
    finish(run, clock)
    assert [stream.state for stream in run.streams] == ["failed", "failed"]
    capsys.readouterr()
    assert report_failures(run) == 1
    assert capsys.readouterr().err.startswith("cadenza generate: error: prompt 1 failed: ")
    assert '"finish_reason": "error"' in json_lines(run, {})[0]


def test_a_run_without_failures_reports_none(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(), text, [ask(0)], clock)
    finish(run, clock)
    assert report_failures(run) == 0


def console_of(width: int, height: int) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True)


@pytest.mark.parametrize("count", by_day([1, 2, 8, 20, 60], {1, 8, 60}))
@pytest.mark.parametrize(
    "size", by_day([(80, 24), (120, 30), (200, 60), (40, 10), (20, 5)], [(80, 24), (20, 5)])
)
def test_a_frame_fits_the_terminal_at_every_step(
    text: TextFrontend, count: int, size: tuple[int, int]
):
    width, height = size
    clock = Ticking()
    shown = "the quick brown fox\njumps \x1b[31mover\x07 [bold]the[/bold] dog 漢字 " * 3
    questions = [ask(index, max_tokens=60, shown=shown) for index in range(count)]
    run = BatchRun(new_core(max_num_queued_reqs=100), text, questions, clock)
    for _ in range(70):
        console = console_of(width, height)
        lines = console.render_lines(frame(run, console), pad=False)
        assert len(lines) <= height - (height > 5)
        assert all(sum(part.cell_length for part in line) <= width for line in lines)
        written = "".join(part.text for line in lines for part in line)
        assert not {"\x1b", "\x07"} & set(written)
        if run.is_done:
            break
        run.step()


def test_a_frame_tells_rows_waiting_done_steps_and_speed(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(max_num_seqs=2), text, [ask(i, max_tokens=9) for i in range(5)], clock)
    for _ in range(4):
        clock.now_s += STEP_S
        run.step()
    console = console_of(80, 24)
    with console.capture() as capture:
        console.print(frame(run, console))
    shown = capture.get()
    for said in ("2/2 rows", "3 waiting", "0 done", "step 4", "6 tokens", "3.0 tok/s", "row 1"):
        assert said in shown, said


def test_frames_are_drawn_no_more_often_than_is_of_use(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(), text, [ask(0)], clock)
    console = console_of(80, 24)
    with live_view(run, console, clock) as frames:
        frames.draw()
        due_s = frames.due_s
        frames.draw()
        assert frames.due_s == due_s
        clock.now_s += 1
        frames.draw()
        assert frames.due_s > due_s


def test_the_result_on_a_terminal_has_every_answer_and_no_control_characters(text: TextFrontend):
    clock = Ticking()
    run = BatchRun(new_core(), text, [ask(0, shown="a\x1b[2Jb"), ask(1)], clock)
    finish(run, clock)
    page = io.StringIO()
    print_result(run, Console(file=page, width=80, height=24))
    shown = page.getvalue()
    assert "\x1b" not in shown
    assert "TTFT" in shown
    assert "prompt 1" in shown
    assert "2 prompts on 2 rows, 6 steps in 3.00 s" in shown
    assert "…" not in shown


def test_an_answer_in_parts_is_told_with_its_reasoning_first() -> None:
    def completion(*parts: OutputPart) -> CompletionOutput:
        return sample(*parts, end="stop")

    thought = [OutputPart("reasoning", each) for each in ("I ", "see.")]
    said = [OutputPart("content", each) for each in ("So", ".")]
    assert whole_text(completion(*thought, *said)) == "I see.\n\nSo."
    assert whole_text(completion(*said)) == "So."
    assert whole_text(completion()) == ""
    for count in range(len(thought) + len(said)):  # it only grows
        begun = whole_text(completion(*[*thought, *said][:count]))
        assert whole_text(completion(*thought, *said)).startswith(begun)
    assert whole_text(replace(completion(), text="as it is", parts=None)) == "as it is"
