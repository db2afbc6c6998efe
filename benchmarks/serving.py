"""Starts `cadenza serve` in a process of its own, for the other scripts of this folder."""

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-c", "from cadenza.cli import main; main()"]


@contextmanager
def serving(model: str | Path | None, *flags: str) -> Generator[str]:
    """Serves a model, or the bundled one, at a free port; yields the URL once it answers."""
    folder = [] if model is None else [str(model)]
    command = [*COMMAND, "serve", *folder, "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = None
    try:
        for line in server.stderr:
            url = url or re.search(r"http://[\d.:]+", line)
            if "engine ready" in line:
                break
        else:
            raise SystemExit(f"the server did not start; run {command} by hand")
        assert url is not None, "the server did not print its URL"
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield url.group()
    finally:
        server.terminate()
        server.wait()
