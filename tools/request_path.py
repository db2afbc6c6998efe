"""Counts the calls, files and classes on the path of a chat request, and the lines of the package.

    python -m tools.request_path [--json] [--before FIGURES.json]

Serves chat requests one at a time in this interpreter: the complete server from the ASGI
application on, the engine process's loop on a thread at the other end of the real socket, and the
fake runner. A profile function counts the package's Python calls of all threads. `--before` takes
the `--json` output of another commit and shows both.

Counted are:
- *request*: from the ASGI application's entry until the first step with the request has been
  launched and the event loop has nothing left to do. Calls of the package's functions (a coroutine
  counts once, comprehensions never), those whose caller is in another file, and the files.
- *token*: from the step's result until the SSE frame with the token is sent, in the middle of a
  stream. Besides the calls, the package's classes whose methods are called or that are
  instantiated, and the messages that are passed.

Invariant: a figure is the median of several requests or tokens, and excludes the runner's own code.
"""

import argparse
import asyncio
import inspect
import json
import os
import socket
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

import cadenza
from cadenza.backends import fake
from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineConfig, EngineLimits
from cadenza.core.scheduler import Scheduler
from cadenza.engine.core import EngineCore
from cadenza.engine.process.child import SocketLink
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.engine_process import EngineProcess, ProcessOptions
from cadenza.engine.process.messages import EngineIdentity, Ready
from cadenza.engine.process.worker import Worker
from tools.size_gate import measure

PACKAGE = Path(cadenza.__file__).parent
NUM_WARM_UPS, NUM_REQUESTS, NUM_TOKENS = 3, 9, 16
WAIT_S = 10.0
FRAME_WAIT_S = 0.2
"""A token whose text is not final yet sends no frame; its window is dropped after this time."""
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(slots=True, eq=False)
class Window:
    """The counts between two points in time."""

    num_calls: int = 0
    num_calls_across_files: int = 0
    files: set[str] = field(default_factory=set[str])
    classes: set[str] = field(default_factory=set[str])
    calls: list[str] = field(default_factory=list[str])


class Recorder:
    """A profile function that counts the calls into `package` while a window is open.

    Args:
        package: the folder whose files are counted.
        left_out: files of it that are not.
        ends_thread: a call of this function ends the window for the calling thread.
    """

    def __init__(
        self,
        package: Path,
        left_out: Iterable[str] = (),
        ends_thread: Callable[..., object] | None = None,
    ) -> None:
        self._prefix = f"{package}{os.sep}"
        self._name = package.name
        self._left_out = frozenset(left_out)
        self._ends_thread = None if ends_thread is None else ends_thread.__code__
        self._ended_threads: set[int] = set()
        self._starts: dict[CodeType, int] = {}
        self._window: Window | None = None

    def open(self) -> Window:
        self._ended_threads.clear()
        self._window = Window()
        return self._window

    def close(self) -> None:
        self._window = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_first = self._is_first_entry(frame, code)
        window = self._window
        if window is None or threading.get_ident() in self._ended_threads:
            return
        if code is self._ends_thread:
            self._ended_threads.add(threading.get_ident())
        elif not self._is_counted(code.co_filename):
            if code.co_filename == "<string>" and code.co_name == "__init__":
                self._note_classes(window, frame)  # of a dataclass
        elif is_first and code.co_name not in _COMPREHENSIONS:
            self._count(window, frame, code)

    def _is_first_entry(self, frame: FrameType, code: CodeType) -> bool:
        """False if a generator or coroutine is resumed; its lowest entry offset is its start."""
        if not code.co_flags & _RESUMED:
            return True
        first = self._starts.setdefault(code, frame.f_lasti)
        if frame.f_lasti < first:
            self._starts[code] = first = frame.f_lasti
        return frame.f_lasti == first

    def _is_counted(self, path: str) -> bool:
        return path.startswith(self._prefix) and path not in self._left_out

    def _count(self, window: Window, frame: FrameType, code: CodeType) -> None:
        name = code.co_filename.removeprefix(self._prefix)
        caller = frame.f_back
        while caller is not None and not self._is_counted(caller.f_code.co_filename):
            caller = caller.f_back
        window.num_calls += 1
        window.num_calls_across_files += (
            caller is not None and caller.f_code.co_filename != code.co_filename
        )
        window.files.add(name)
        window.calls.append(f"{name}:{code.co_qualname}")
        self._note_classes(window, frame)

    def _note_classes(self, window: Window, frame: FrameType) -> None:
        """Records the class of a method, and the classes of message arguments.

        msgspec creates messages in C, without a call that a profile function sees.
        """
        code, values = frame.f_code, frame.f_locals
        for place, name in enumerate(code.co_varnames[: code.co_argcount]):
            value = values.get(name)
            kind = value if isinstance(value, type) else type(value)
            is_own = place == 0 and name in {"self", "cls"}
            is_of_package = kind.__module__.partition(".")[0] == self._name
            if is_of_package and (is_own or issubclass(kind, msgspec.Struct)):
                window.classes.add(f"{kind.__module__}.{kind.__qualname__}")


class Marks(list[tuple[str, int]]):
    """A trace for the fake runner that calls `on_mark` when a step is launched or read."""

    def __init__(self, on_mark: Callable[[str], None]) -> None:
        super().__init__()
        self._on_mark = on_mark

    def append(self, entry: tuple[str, int], /) -> None:
        self._on_mark(entry[0])


class EngineThread:
    """Stands in for the process of a `ChildProcess`: runs the engine's loop on a thread."""

    def __init__(self, core: EngineCore, fds: Sequence[int], output: int) -> None:
        self.pid = os.getpid()
        self._core = core
        self._connection = socket.socket(fileno=os.dup(fds[0]))
        self._held = [os.dup(fds[1]), os.dup(output)]  # a process keeps them open until it exits
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        """Does nothing: the thread ends when the socket's other end is closed."""

    def send_signal(self, sig: int) -> None:
        """Does nothing: threads receive no signals."""

    def _serve(self) -> None:
        link = SocketLink(self._connection)
        link.receive_one()
        worker = Worker(self._core, link)
        check = self._core.request_check
        ready = Ready(
            request_check=check,
            identity=EngineIdentity(),
            startup_s={},
            stats=worker.meter.stats(),
        )
        link.send(ready)
        worker.serve()
        self._connection.close()
        for held in self._held:
            os.close(held)


class Bench:
    """A server, and the windows of its requests and tokens."""

    def __init__(self, recorder: Recorder) -> None:
        from cadenza.frontend.text_frontend import TextFrontend
        from cadenza.loading.build import find_checkpoint

        self._recorder = recorder
        self._waits_for: str | None = None
        self._window: Window | None = None
        self._sent = threading.Event()
        self.requests: list[Window] = []
        self.tokens: list[Window] = []
        checkpoint = find_checkpoint(None)
        limits = EngineLimits(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=512,
            page_size=16,
            num_pages=512,
            max_num_queued_reqs=32,
        )
        runner = FakeRunner(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_pages_per_seq=limits.max_pages_per_seq,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            vocab_size=checkpoint.config.vocab_size,
            trace=Marks(self._on_mark),
        )
        core = EngineCore(runner, limits)
        options = ProcessOptions(
            open_child=lambda command: ChildProcess(
                command, lambda _, fds, output: EngineThread(core, fds, output)
            )
        )
        self.engine = EngineProcess(None, EngineConfig(), options)
        self.text = TextFrontend(checkpoint, max_model_len=limits.max_model_len)

    def _on_mark(self, mark: str) -> None:
        """Called on the engine's thread when a step was launched or read."""
        if mark == "launch" and self._waits_for == "launch":
            self._waits_for = None
            self._wait_for_idle_loop()
            self._recorder.close()
        elif mark == "read" and self._waits_for == "token":
            self._sent.clear()
            self._window = self._recorder.open()
        elif mark == "launch" and self._window is not None:
            # The next step must not start before the token's frame is sent.
            if self._sent.wait(FRAME_WAIT_S):
                self.tokens.append(self._window)
            self._recorder.close()
            self._window = None

    def _wait_for_idle_loop(self) -> None:
        """Waits until the event loop has run the callbacks that the request scheduled."""
        for _ in range(8):
            has_run = threading.Event()
            self._loop.call_soon_threadsafe(has_run.set)
            assert has_run.wait(WAIT_S)

    async def run(self) -> None:
        from cadenza.server.app import App
        from cadenza.server.model_pool import ModelPool, PoolOptions
        from cadenza.server.served_model import ModelNames, ServedModel
        from cadenza.server.service import ServerOptions, Service

        self._loop = asyncio.get_running_loop()
        options = ServerOptions(is_logging_requests=False)
        model = ServedModel(ModelNames(listed=("m",)), self.text, lambda _: self.engine)
        service = Service(ModelPool([model], PoolOptions(), options.clock), options)
        service.start()
        app = App(service)
        await asyncio.to_thread(self.engine.wait_ready, WAIT_S)
        for _ in range(NUM_WARM_UPS):
            await self._request(app)
        for _ in range(NUM_REQUESTS):
            self._waits_for = "launch"
            window = self._recorder.open()
            await self._request(app)
            self.requests.append(window)
        self._waits_for = "token"
        while len(self.tokens) < NUM_TOKENS:
            await self._request(app)
        self._waits_for = None
        await service.stop()

    async def _request(self, app: Any) -> None:
        body = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
        }
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        is_over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not messages:
                await is_over.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: Mapping[str, Any]) -> None:
            assert message.get("status", 200) == 200, message
            if message["type"] == "http.response.body":
                self._recorder_close_for_frame(message["body"])

        await app(_scope(), receive, send)
        is_over.set()

    def _recorder_close_for_frame(self, body: bytes) -> None:
        if self._waits_for == "token" and body.startswith(b"data: "):
            self._recorder.close()
            self._sent.set()


def _scope() -> dict[str, Any]:
    path = "/v1/chat/completions"
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


def measure_path() -> dict[str, Any]:
    """The figures of the request's and of the token's path."""
    recorder = Recorder(PACKAGE, {str(Path(fake.__file__))}, Scheduler.schedule)
    bench = Bench(recorder)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(bench.run())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return {"request": figures_of(bench.requests), "token": figures_of(bench.tokens)}


def figures_of(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians, and the classes and calls of the median window."""
    by_size = sorted(windows, key=lambda window: window.num_calls)
    middle = by_size[len(by_size) // 2]
    return {
        "calls": statistics.median_low(window.num_calls for window in windows),
        "calls_across_files": statistics.median_low(
            window.num_calls_across_files for window in windows
        ),
        "files": statistics.median_low(len(window.files) for window in windows),
        "classes": statistics.median_low(len(window.classes) for window in windows),
        "class_names": sorted(middle.classes),
        "call_names": middle.calls,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The number of Python files directly in a folder, and their lines."""

    num_files: int
    num_lines: int


def measure_source(package: Path) -> dict[str, Any]:
    """Lines and files per folder; median and 99th percentile of function lengths."""
    folders: dict[str, list[int]] = defaultdict(list)
    functions: list[int] = []
    for path in sorted(package.rglob("*.py")):
        for thing in measure(path):
            if thing.is_function:
                functions.append(thing.num_lines)
            else:
                folders[str(path.parent.relative_to(package.parent))].append(thing.num_lines)
    functions.sort()
    return {
        "folders": {
            name: asdict(Folder(num_files=len(lines), num_lines=sum(lines)))
            for name, lines in sorted(folders.items())
        },
        "function_lines_median": statistics.median_low(functions),
        "function_lines_p99": functions[-(-len(functions) * 99 // 100) - 1],
    }


def rows_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """The figures as rows of the table: title to value."""
    rows: dict[str, str] = {}
    for way, title in (("request", "request to first launch"), ("token", "token to SSE frame")):
        for name in ("calls", "calls_across_files", "files", "classes"):
            rows[f"{title}: {name.replace('_', ' ')}"] = str(figures[way][name])
    source = figures["source"]
    for name, folder in source["folders"].items():
        rows[f"{name}: lines (files)"] = f"{folder['num_lines']} ({folder['num_files']})"
    rows["function lines: median"] = str(source["function_lines_median"])
    rows["function lines: p99"] = str(source["function_lines_p99"])
    return rows


def print_table(figures: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    columns = [rows_of(figures)] if before is None else [rows_of(before), rows_of(figures)]
    table = Table("what", *(["now"] if before is None else ["before", "now"]))
    for name in dict.fromkeys(name for rows in columns for name in rows):
        table.add_row(name, *(rows.get(name, "") for rows in columns))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Counts what a chat request costs in code.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--before", type=Path, help="figures of another commit, as JSON")
    asked = parser.parse_args(arguments)
    figures = {**measure_path(), "source": measure_source(PACKAGE)}
    if asked.json:
        print(json.dumps(figures, indent=1))
        return
    print_table(figures, None if asked.before is None else json.loads(asked.before.read_text()))


if __name__ == "__main__":
    main()
