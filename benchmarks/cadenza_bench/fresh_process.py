"""A fresh Python process that measures and prints a JSON object."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.errors import RunnerError

# The folder of this package, which a fresh process finds where this one does.
ROOT = Path(__file__).parents[1]


def run_in_fresh_process(
    module: str, argument: str, *, what: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object in the last line that `python -m module argument` prints. `what`: the
    measurement, as an error message names it; `env`: added to this process's environment. Raises
    RunnerError where it failed, with the last line of its stderr, or took longer than `timeout_s`.
    """
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", module, argument],
            env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunnerError(f"{what} took more than {timeout_s:.0f} s") from error
    if ran.returncode != 0:
        last = ran.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise RunnerError(f"{what} failed with exit code {ran.returncode}: {last[0]}")
    return json.loads(ran.stdout.splitlines()[-1])
