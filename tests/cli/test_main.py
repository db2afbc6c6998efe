"""Exit codes, error lines, what a start costs, Ctrl-C, and what a long command shows."""

import gc
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command

import cadenza as package
from cadenza.cli import INTERRUPTED, main
from cadenza.cli.app import build_app
from cadenza.cli.interrupts import dropped_interrupts_raised
from cadenza.cli.options import VARIABLES_WITHOUT_FLAG, variables_of
from cadenza.cli.status import PlainStatus, progress_bar, status_line
from tests.by_day import by_day
from tests.cli.harness import COMMAND, ENGINE, Cadenza, Ran, run_cadenza

COMMANDS = ("generate", "run", "chat", "info", "verify")
HEAVY = {"jax", "jaxlib", "ml_dtypes", "numpy", "tokenizers", "jinja2", "rich"}
MAX_MODULES = 400


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_the_packages(cadenza: Cadenza, word: str):
    assert cadenza(word) == Ran(0, f"cadenza {package.__version__} (a source tree)\n", "")


def test_the_package_is_the_command_too():
    ran = subprocess.run(
        [sys.executable, "-m", "cadenza", "no-such-command"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr.partition(":")[0]) == (2, "cadenza")


def test_h_is_short_for_help(cadenza: Cadenza):
    for words in ((), ("serve",), ("bench", "throughput")):
        shown = cadenza(*words, "-h")
        assert shown.code == 0
        assert shown == cadenza(*words, "--help")


def test_help_is_complete_and_loads_nothing_heavy():
    """Of all commands, in one new process."""
    asked = [["--help"], *([name, "--help"] for name in COMMANDS)]
    script = (
        "import json, sys; from cadenza.cli import main\n"
        f"codes = [main(words) for words in {asked!r}]\n"
        "print(json.dumps([codes, sorted(sys.modules)]), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    codes, modules = json.loads(ran.stderr)
    assert codes == [0] * (1 + len(COMMANDS))
    assert ran.stdout.count("Usage: cadenza") == len(codes)
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    assert len(modules) < MAX_MODULES


def test_help_lists_every_command(cadenza: Cadenza):
    shown = cadenza("--help").out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_without_a_command_help_is_shown_and_the_code_is_2(cadenza: Cadenza):
    ran = cadenza()
    assert (ran.code, ran.err) == (2, "")
    assert ran.out == cadenza("--help").out


def test_a_number_that_is_none_names_the_flag_and_not_its_aliases(cadenza: Cadenza):
    ran = cadenza("info", "-np", "many")
    assert "'--max-num-seqs'" in ran.err or "'-np'" in ran.err
    assert "--decode-concurrency" not in ran.err


@pytest.mark.parametrize("command", ["generate", "chat", "run"])
def test_sampling_that_cannot_work_is_refused_before_a_model_is_opened(
    cadenza: Cadenza, tmp_path: Path, command: str
):
    words = [] if command == "chat" else ["hello"]
    ran = cadenza(command, *words, "--model", tmp_path / "absent", "--temperature", -1)
    assert (ran.code, ran.out, "temperature" in ran.err) == (2, "", True)


@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_a_model_that_cannot_be_loaded_exits_with_3(cadenza: Cadenza, tmp_path: Path, command: str):
    words = ["hello"] if command == "generate" else []
    ran = cadenza(command, *words, "--model", tmp_path / "absent")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "does not exist" in ran.err
    (tmp_path / "config.json").write_text("{")
    assert cadenza(command, tmp_path, *words).code == 3


def test_a_device_that_is_not_there_exits_with_3(cadenza: Cadenza, model: Path):
    ran = cadenza("info", model, "--device", "tpu:7")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert "--device tpu:7" in ran.err


def test_a_device_of_no_such_form_exits_with_2(cadenza: Cadenza, model: Path):
    assert cadenza("info", model, "--device", "abacus").code == 2


def test_a_plan_that_does_not_fit_exits_with_2(cadenza: Cadenza, model: Path):
    assert cadenza("info", model, "--max-model-len", 1 << 20).code == 2


def test_a_traceback_is_shown_only_on_demand(cadenza: Cadenza, monkeypatch: pytest.MonkeyPatch):
    assert "Traceback" not in cadenza("info", "absent").err
    monkeypatch.setenv("CADENZA_TRACEBACK", "1")
    ran = cadenza("info", "absent")
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("cadenza: error: ")


def test_a_variable_that_cannot_work_is_wrong_use(
    cadenza: Cadenza, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "many")
    ran = cadenza("info", model)
    assert ran.code == 2
    assert "CADENZA_MAX_NUM_SEQS" in ran.err


def test_a_reader_that_goes_away_ends_the_command_quietly(model: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        ran = subprocess.run(
            [*COMMAND, "info", str(model)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (141, "")


SHORT = ["--max-tokens", 3, "--ignore-eos", *ENGINE]
OUTPUTS = {
    "help": ["--help"],
    "version": ["--version"],
    "info": ["info", "MODEL"],
    "info_json": ["info", "MODEL", "--json"],
    "generate": ["generate", "MODEL", "the", *SHORT],
    "generate_json": ["generate", "MODEL", "the", "--json", *SHORT],
    "chat": ["chat", "MODEL", *SHORT],
    "verify": ["verify", "--help"],
    "bench": ["bench", "--help"],
}


@pytest.mark.parametrize(
    "output",
    by_day(
        [*((name, "") for name in OUTPUTS), ("info", "1"), ("generate", "1")],
        [("help", ""), ("info", "1")],
    ),
)
def test_a_full_disk_is_told_in_one_line_and_by_the_exit_code(model: Path, output: tuple[str, str]):
    name, unbuffered = output
    arguments = [str(model) if each == "MODEL" else str(each) for each in OUTPUTS[name]]
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            input="the\n",
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), ran.stderr
    assert "cadenza: error: the output cannot be written: No space left on device" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [pytest.param(["info", "MODEL"], 0, marks=pytest.mark.soak), (["info", "absent"], 3)],
)
def test_an_error_that_cannot_be_told_still_has_its_exit_code(
    model: Path, arguments: list[str], code: int
):
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [*COMMAND, *(str(model) if each == "MODEL" else each for each in arguments)],
            stdout=subprocess.PIPE,
            stderr=full,
            env={**os.environ, "CADENZA_MAX_SEQS": "4"},
            timeout=120,
            check=False,
        )
    assert ran.returncode == code


@pytest.mark.parametrize("closed", by_day(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], {"<&- >&- 2>&-"}))
def test_streams_that_are_closed_are_no_error(model: Path, closed: str):
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, "info", str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_misspelt_variable_is_told_with_the_one_that_was_meant(
    cadenza: Cadenza, monkeypatch: pytest.MonkeyPatch
):
    for name in ("CADENZA_MAX_SEQS", "CADENZA_GENERATION_CONFG", "cadenza_seed", "CADENZA_PROT"):
        monkeypatch.setenv(name, "4")
    ran = cadenza("--version")
    assert (ran.code, ran.out) == (0, f"cadenza {package.__version__} (a source tree)\n")
    assert ran.err.splitlines() == [
        f"cadenza: warning: {given} is set, but nothing reads it; did you mean {meant}?"
        for given, meant in (
            ("CADENZA_GENERATION_CONFG", "CADENZA_GENERATION_CONFIG"),
            ("CADENZA_MAX_SEQS", "CADENZA_MAX_NUM_SEQS"),
            ("CADENZA_PROT", "CADENZA_PORT"),
            ("cadenza_seed", "CADENZA_SEED"),
        )
    ]


def test_variables_that_are_read_and_those_of_others_are_not_told(
    cadenza: Cadenza, monkeypatch: pytest.MonkeyPatch
):
    """The others are those that Kubernetes sets for a service called cadenza, and a user's own."""
    kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    for name in (*kubernetes, "TEST_MARK", "HOMEPAGE", "HOSTNAME", ""):
        monkeypatch.setenv(f"CADENZA_{name}", "4")
    for name in (
        "CADENZA_NUM_THREADS",
        "CADENZA_MAX_NUM_SEQS",
        "CADENZA_API_KEY",
        "ACADENZA_SEEDS",
    ):
        monkeypatch.setenv(name, "4")
    assert cadenza("--version").err == ""


READ = re.compile(r"\bCADENZA_[A-Z0-9_]+")
SOURCES = Path(package.__file__).parents[2]


def test_every_variable_that_the_sources_read_is_known():
    """Macros of the C++ sources apart: there a variable is a text."""
    known = VARIABLES_WITHOUT_FLAG.keys() | variables_of(get_command(build_app()))
    named = set[str]()
    for path in (SOURCES / "src").rglob("*.py"):
        named |= set(READ.findall(path.read_text()))
    sources = [*(SOURCES / "csrc").rglob("*.cpp"), *(SOURCES / "csrc").rglob("*.h")]
    for path in [each for each in sources if each.stem != "emulated"]:  # of tests alone
        named |= set(re.findall(r'getenv\("(CADENZA_[A-Z0-9_]+)"\)', path.read_text()))
    assert len(named) > len(VARIABLES_WITHOUT_FLAG)
    assert named <= known


def test_output_that_the_locale_cannot_encode_is_replaced_rather_than_an_error(model: Path):
    ran = run_cadenza(["info", model], PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"revision +\?", ran.out)


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


ONCE_S = 0.001


@pytest.fixture
def lines() -> "queue.Queue[str]":
    return queue.Queue()


def test_in_a_pipe_a_line_says_what_is_done_and_another_what_is_done_then(
    lines: "queue.Queue[str]",
):
    with PlainStatus("loading", ONCE_S, lines.put) as status:
        assert lines.get(timeout=10) == "cadenza: loading"
        status("run 1 of 2, about 2 min left")
        assert lines.get(timeout=10) == "cadenza: run 1 of 2, about 2 min left"
    assert lines.empty()


def test_what_goes_on_is_said_once(lines: "queue.Queue[str]"):
    with PlainStatus("loading", ONCE_S, lines.put) as status:
        for text in ("loading", "loading", "running"):
            status(text)
        assert lines.get(timeout=10) in ("cadenza: loading", "cadenza: running")
    assert lines.qsize() <= 1


def test_a_pipe_that_nobody_reads_is_no_error():
    def write(_: str) -> None:
        raise BrokenPipeError

    with PlainStatus("loading", ONCE_S, write) as status:
        status("running")


@pytest.mark.parametrize("shown", [status_line, progress_bar])
def test_a_short_command_says_nothing_in_a_pipe(shown: object, capsys: pytest.CaptureFixture[str]):
    with shown("loading"):  # type: ignore[operator]
        pass
    assert capsys.readouterr() == ("", "")


def test_lines_of_the_result_go_to_stdout_at_once(capsys: pytest.CaptureFixture[str]):
    with status_line("running") as status:
        status.print("1  23.4")
        assert capsys.readouterr() == ("1  23.4\n", "")


def test_on_a_terminal_lines_of_the_result_go_to_stdout_and_the_spinner_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert Console(stderr=True).is_terminal
    with status_line("running") as status:
        status.print("1  23.4")
        status("running still")
    captured = capsys.readouterr()
    assert captured.out == "1  23.4\n"
    assert "running" in captured.err
