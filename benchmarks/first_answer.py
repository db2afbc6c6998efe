"""From wheels at hand to an answer: a new environment, the install, the first answer, the second.

    python -m tools.release 0.1.0 --dry-run --only linux-x86_64     # or make wheel
    pip download --only-binary=:all: --dest wheels dist/*.whl       # the network's part, apart
    python benchmarks/first_answer.py --wheels wheels --json

No compiler, no index and none of Cadenza's caches are used; the files themselves may be in the page
cache. `mib` is what each library takes on disk.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = ("generate", "The capital of France is", "--max-tokens", "8")
WANTED = "Paris"
MOST_S = 60.0


def main() -> int:
    """0 if the answer came within `MOST_S`."""
    parser = argparse.ArgumentParser(description="Time an install and its first answer.")
    parser.add_argument(
        "--wheels", type=Path, required=True, help="a folder that pip download made"
    )
    parser.add_argument("--package", default="cadenza")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--arguments", nargs="*", default=(), help="further ones of generate")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    print(json.dumps(found) if asked.json else as_text(found))
    return 0 if found["first_answer_after_s"] <= MOST_S else 1


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    venv, bin = folder / "venv", folder / "venv" / "bin"
    environment = {
        **os.environ,
        "CC": "false",
        "CXX": "false",
        "PYTHONPATH": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CADENZA_CACHE_DIR": str(folder / "cache" / "cadenza"),
    }
    answer = [bin / "cadenza", *PROMPT, *asked.arguments]
    pip = [bin / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-index", "--find-links", asked.wheels.resolve(), asked.package]
    steps: dict[str, float] = {}
    for name, command in (
        ("environment_s", [asked.python, "-m", "venv", venv]),
        ("install_s", install),
        ("first_answer_s", answer),
        ("second_answer_s", answer),
    ):
        started = time.monotonic()
        ran = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        steps[name] = time.monotonic() - started
        if ran.returncode or ("answer" in name and WANTED not in ran.stdout):
            sys.exit(f"{name}: {ran.stdout}{ran.stderr}")
    sizes = installed_mib(next((venv / "lib").glob("python3*/site-packages")))
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "package": asked.package,
        **steps,
        "first_answer_after_s": sum(steps.values()) - steps["second_answer_s"],
        "installed_mib": sum(sizes.values()),
        "mib": sizes,
    }


def installed_mib(site: Path) -> dict[str, float]:
    """What each folder of the site takes, largest first, those below 1 MiB together."""
    sizes: dict[str, float] = {}
    for path in site.rglob("*"):
        if path.is_file() and not path.is_symlink():
            part = path.relative_to(site).parts[0].partition("-")[0].removesuffix(".libs")
            sizes[part] = sizes.get(part, 0.0) + path.stat().st_blocks * 512 / (1 << 20)
    large = {name: size for name, size in sizes.items() if size >= 1}
    rest = sum(sizes.values()) - sum(large.values())
    return dict(sorted(large.items(), key=lambda each: -each[1])) | {"others": rest}


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def as_text(found: dict[str, Any]) -> str:
    lines = [f"{key:<22} {value:.1f}" for key, value in found.items() if isinstance(value, float)]
    parts = [f"  {name:<20} {size:7.1f} MiB" for name, size in found["mib"].items()]
    return "\n".join([found["machine"], *lines, *parts])


if __name__ == "__main__":
    sys.exit(main())
