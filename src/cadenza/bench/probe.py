"""A measurement in a fresh Python process: `run_probe`.

Owns the running of a module of ours and the reading of its answer; what is measured is the
module's. Invariant: a probe that fails or hangs is an error that says how it ended.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cadenza.errors import RunnerError


def run_probe(
    module: str, asked: str, *, what: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object in the last line that `python -m module asked` prints.

    Args:
        what: what the probe does, as an error names it.
        env: set beside this process's own environment.

    Raises:
        RunnerError: it failed, with its last line, or took longer than `timeout_s`.
    """
    try:
        ran = subprocess.run(  # noqa: S603 - this interpreter, our own module
            [sys.executable, "-m", module, asked],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunnerError(f"{what} took more than {timeout_s:.0f} s") from error
    if ran.returncode != 0:
        last = ran.stderr.strip().splitlines()[-1:] or ["without a word"]
        raise RunnerError(f"{what} failed with exit code {ran.returncode}: {last[0]}")
    return json.loads(ran.stdout.splitlines()[-1])
