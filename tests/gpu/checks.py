"""Checks on a card that are several processes, or are made only where a library with faults is.
Each prints one JSON object.

    python -m tests.gpu.checks families|self-test|tests|weights
"""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.kernels import FAULTY, PACKAGE, ROOT

CADENZA = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")
VERIFY = (*CADENZA, "verify", "--device", "cuda", "--ops", "cuda", "--json")
FEW = ("--max-num-seqs", "8", "--num-requests", "16")

# Shapes, with their options.
FAMILIES = (
    ("tiny-deepseek-v3",),
    ("tiny-qwen3.5",),
    ("tiny-gpt-oss",),
    ("tiny-qwen3-moe",),
    ("tiny-gemma4",),
    ("tiny-granite4",),
    ("tiny-qwen3-vl", "--images"),
)

# Tests that need what only the emulation has, or that are of these scripts.
LEFT_OUT = ("proof", "measures", "steps", "gpu_kernels", "gpu_script")


def check_families(command: tuple[str, ...] = (*VERIFY, "--reference", "solo")) -> dict[str, Any]:
    """The last line of `verify` for a small model of each family, side by side."""
    commands = {shape: (*command, *FEW, "--shape", shape, *options) for shape, *options in FAMILIES}
    with ThreadPoolExecutor(len(commands)) as pool:
        ran = dict(zip(commands, pool.map(_run, commands.values()), strict=True))
    return {
        "passed": all(each.returncode == 0 for each in ran.values()),
        "last_lines": {shape: _last_line(each) for shape, each in ran.items()},
    }


def _last_line(ran: subprocess.CompletedProcess[str]) -> str:
    try:
        return json.loads(ran.stdout.strip().splitlines()[-1])["last_line"]
    except (IndexError, KeyError, TypeError, ValueError):
        errors = ran.stderr.strip().splitlines()
        return f"exit {ran.returncode}: {errors[-1] if errors else ''}"


def check_self_test(library: Path = FAULTY) -> dict[str, Any]:
    if not library.is_file():
        reason = f"there is no library with faults: {library}"
        return {"skipped": reason, "last_line": reason}
    ran = _run((*VERIFY, "--self-test", *FEW))
    if not ran.stdout.strip():
        sys.exit(ran.stderr[-3000:])
    return json.loads(ran.stdout.strip().splitlines()[-1]) | {"passed": ran.returncode == 0}


def check_tests() -> dict[str, Any]:
    """The kernels' tests on the card, by half of the CPUs where pytest-xdist is there."""
    given = {"CADENZA_TEST_GPU": str(PACKAGE / "_cuda.so"), "CADENZA_TEST_GPU_FAULTS": str(FAULTY)}
    ran = _run(pytest_command(len(os.sched_getaffinity(0))), os.environ | given)
    lines = ran.stdout.strip().splitlines()
    short = [each for each in lines if each.startswith(("FAILED", "ERROR"))]
    return {
        "passed": ran.returncode == 0,
        "last": lines[-1:] or ran.stderr.strip().splitlines()[-1:],
        "failed": short,
        "output": [] if ran.returncode == 0 else lines[-400:],
    }


def pytest_command(cpus: int) -> tuple[str, ...]:
    """pytest-benchmark warns beside pytest-xdist, and warnings are errors."""
    left_out = [f"--ignore=tests/cuda/test_{name}.py" for name in LEFT_OUT]
    options = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if importlib.util.find_spec("pytest_timeout"):
        options += ["--timeout", "60"]
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(max(1, min(8, cpus // 2)))]
    return (sys.executable, "-m", "pytest", *options, "tests/cuda", *left_out)


def write_weights(shapes: tuple[str, ...] = ("llama-3.2-1b", "smollm2-135m")) -> dict[str, Any]:
    from cadenza.bench.checkpoints import cached_checkpoint

    cache = Path(os.environ["CADENZA_CACHE_DIR"])
    return {"written": [cached_checkpoint(each, cache).name for each in shapes]}


def _run(
    command: tuple[str, ...], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


CHECKS = {
    "families": check_families,
    "self-test": check_self_test,
    "tests": check_tests,
    "weights": write_weights,
}

if __name__ == "__main__":
    print(json.dumps(CHECKS[sys.argv[1]]()))
