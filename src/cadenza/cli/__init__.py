"""The command line. `main` is the `cadenza` command: it runs a subcommand and gives its exit code.

Owns the exit codes (0 done, 1 a check or a request failed, 2 wrong use, 3 could not load, which is
2 of `serve`, 4 not all that `verify` should show was shown, 130 Ctrl-C, 141 the reader of the
output went away) and the form of errors, one line on stderr. Invariant: neither jax nor tokenizers
is loaded before a subcommand's body runs, and a Python traceback is shown only with
CADENZA_TRACEBACK=1 or for a bug.

Modules:

- `app`: the command line program
- `app_flags`: those flags as the keywords of a Ray Serve application
- `serve_flags`: the flags of `serve`, as options of its parts
- `served_models`: the models of `serve`: names, checkpoints, engine processes
- `serve`, `generate`, `info`, `doctor`, `bench`: one subcommand each
- `chat`, `export`, `verify`: `chat` and `run`, `export` and `quantize`, `verify` and `replay`
- `conversation`, `chat_terminal`: the turns of `chat` and its commands; wrapped answers, what was
  typed
- `top`, `top_view`: a server's batch in the terminal
- `cached_models`: `list`, `pull` and `rm`, for the hub's cache
- `options`, `sampling_flags`: how flags are declared; the shared ones
- `config_file`: flags from a file
- `words`: which word is the model; prompts from files and stdin
- `report`: a result's columns, described once, give its table and its JSON; a benchmark's whole
  result, with charts
- `status`: what a long command is doing, on a terminal and in a pipe
- `bench_command`, `bench_report`: what benchmarks have in common; `bench serve`; what is printed
- `batch_run`, `generate_view`: prompts in one batch; its view in a terminal, and what is printed
- `interrupts`: signals
"""

import io
import os
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, TextIO, cast

from cadenza.cli.interrupts import dropped_interrupts_raised
from cadenza.errors import (
    CadenzaError,
    CheckpointError,
    ConfigError,
    DeviceUnavailableError,
    InvalidRequestError,
)

DONE, FAILED, WRONG_USE, COULD_NOT_LOAD = 0, 1, 2, 3
INTERRUPTED = 128 + 2
OUTPUT_CLOSED = 128 + 13

_CODES: tuple[tuple[tuple[type[CadenzaError], ...], int], ...] = (
    ((ConfigError, InvalidRequestError), WRONG_USE),
    ((CheckpointError, DeviceUnavailableError), COULD_NOT_LOAD),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `cadenza` with `arguments` (None: the process's own); returns its exit code."""
    with _usable_streams(), dropped_interrupts_raised():
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            return OUTPUT_CLOSED
        except OutputError as error:
            _print_error(
                "cadenza", f"the output cannot be written: {error.strerror}; send it elsewhere"
            )
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        except CadenzaError as error:
            _print_error("cadenza", str(error))
            return next((code for kinds, code in _CODES if isinstance(error, kinds)), FAILED)
        return code


class OutputError(OSError):
    """stdout or stderr cannot be written, say because a disk is full."""


class _Output(io.FileIO):
    """A file whose failures are `OutputError`s. It discards what is written once the command is
    over: since Python 3.13 a text stream that is collected with unwritten buffers reports an error.
    """

    is_discarding = False

    def write(self, data: Any, /) -> int:
        if self.is_discarding:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


@contextmanager
def _usable_streams() -> Generator[None]:
    """stdin, stdout and stderr are open, take any character, and raise OutputError. What could not
    be written is dropped at the end, so that the interpreter does not try again."""
    streams = sys.stdin, sys.stdout, sys.stderr
    with ExitStack() as stack:
        # A stream that was closed before the command began is None.
        sys.stdin = sys.stdin or stack.enter_context(open(os.devnull, encoding="utf-8"))
        sys.stdout = sys.stdout or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        sys.stderr = sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            # A model may write any character; "?" replaces those that the encoding lacks.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                buffer: Any = getattr(stream, "buffer", None)
                raw: object = getattr(buffer, "raw", buffer)
                if isinstance(raw, _Output):
                    raw.is_discarding = True
            sys.stdin, sys.stdout, sys.stderr = streams


def _guarded(stream: TextIO) -> TextIO:
    wrapper: Any = stream
    buffer: Any = getattr(stream, "buffer", None)
    raw: object = getattr(buffer, "raw", buffer)
    if not isinstance(wrapper, io.TextIOWrapper) or not isinstance(raw, io.FileIO):
        return stream
    output = _Output(raw.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        cast(BinaryIO, output if raw is buffer else io.BufferedWriter(output)),
        encoding=wrapper.encoding,
        line_buffering=wrapper.line_buffering,
        write_through=wrapper.write_through,
    )


def _run(arguments: Sequence[str]) -> int:
    import typer
    from typer.main import get_command

    from cadenza.cli.app import build_app
    from cadenza.cli.options import misspelt_variables

    command = get_command(build_app())
    for given, meant in misspelt_variables(command, os.environ).items():
        _print_line(
            f"cadenza: warning: {given} is set, but nothing reads it; did you mean {meant}?"
        )
    try:
        with command.make_context("cadenza", list(arguments)) as context:
            result = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return INTERRUPTED
    except _parser_errors() as fault:
        return _report_usage(fault)
    return result if isinstance(result, int) else DONE


def _parser_errors() -> tuple[type[Exception], ...]:
    """The parser's own errors: `BadParameter` and its siblings, which typer does not export."""
    import typer

    return tuple(
        each
        for each in typer.BadParameter.__mro__
        if issubclass(each, Exception) and hasattr(each, "format_message")
    )


def _report_usage(fault: Exception) -> int:
    shown = cast(Any, fault)
    path: str = getattr(shown.ctx, "command_path", "cadenza")
    parameter = getattr(shown, "param", None)
    if parameter is not None and shown.param_hint is None and parameter.param_type_name == "option":
        source = shown.ctx.get_parameter_source(parameter.name)
        shown.param_hint = f"'{_name_of(parameter, source, shown.ctx.params)}'"
    message: str = shown.format_message()
    _print_error(path, f"{message.strip().removesuffix('.')}; see `{path} --help`")
    return WRONG_USE


def _name_of(parameter: Any, source: Any, parsed: Mapping[str, Any]) -> str:
    kind = None if source is None else source.name
    if kind == "ENVIRONMENT":
        return parameter.envvar
    if kind == "DEFAULT_MAP":
        file = parsed["config_file"]
        return f"{file.written[parameter.name]} in {file.path}"
    return parameter.opts[0]


def _print_error(where: str, message: str) -> None:
    if os.environ.get("CADENZA_TRACEBACK") == "1":
        traceback.print_exc()
    _print_line(f"{where}: error: {' '.join(message.split())}")


def _print_line(line: str) -> None:
    """Prints on stderr; a failure to do so does not change the exit code."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
