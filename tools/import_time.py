"""Measures the time of `import cadenza`: the median over several fresh interpreters.

Uses the interpreter's `-X importtime`, which excludes the start of Python itself. Prints one line;
fails above the limit. Invariant: every run is a new process.
"""

import re
import statistics
import subprocess
import sys

NUM_RUNS = 9
LIMIT_S = 0.3

_LINE = re.compile(r"^import time:\s*\d+ \|\s*(?P<cumulative_us>\d+) \| cadenza$", re.MULTILINE)


def main() -> int:
    """Returns 0 if the median is within the limit."""
    seconds = [import_seconds() for _ in range(NUM_RUNS)]
    median = statistics.median(seconds)
    print(
        f"import cadenza: median {median * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms "
        f"of {NUM_RUNS} runs (limit {LIMIT_S * 1e3:.0f} ms)"
    )
    return 0 if median <= LIMIT_S else 1


def import_seconds() -> float:
    """Seconds that a fresh interpreter spends in `import cadenza`, including nested imports."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import cadenza"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    match = _LINE.search(run.stderr)
    if match is None:
        raise RuntimeError("the interpreter did not report the import of cadenza")
    return int(match["cumulative_us"]) / 1e6


if __name__ == "__main__":
    sys.exit(main())
