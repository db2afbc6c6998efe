"""Runs the steps of run.sh; writes `report.md`, `report.json` and `result.json` after each.

A step is a command with a time limit, whose output is a JSON object; what it could not show is in
the report with its last lines.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.kernels import progress
from tests.gpu.report import Result, format_report, has_passed, outcome

ROOT = Path(__file__).resolve().parents[2]
CADENZA = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")
PROBES = (sys.executable, "-m", "tests.gpu.probes")
CARD = ("--device", "cuda", "--ops", "cuda")
ALL_S = 890
"""Of all steps together: the limits add up to it."""

KERNELS = "kernels"
"""The step that all others need."""

CONTEXT = 1024
ROWS = {"8B": "1,8,64,256", "1B": "1,8,64,256", "135M": "1,8,64,256"}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    limit_s: int
    command: tuple[str, ...]


def steps(out: Path) -> tuple[Step, ...]:
    """In the order of what matters most."""
    shapes = {"8B": str(out / "8b"), "1B": "llama-3.2-1b", "135M": "smollm2-135m"}

    def throughput(name: str) -> tuple[str, ...]:
        model = (shapes[name],) if name == "8B" else ("--shape", shapes[name])
        lengths = ("--input-len", str(CONTEXT), "--output-len", "32", "--repeats", "1")
        common = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.9", "--json")
        rows = ("--concurrency", ROWS[name])
        return (*CADENZA, "bench", "throughput", *model, *CARD, *lengths, *common, *rows)

    def verify(*options: str) -> tuple[str, ...]:
        return (*CADENZA, "verify", *CARD, "--json", *options)

    int8 = ("--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8")
    return (
        Step(KERNELS, 300, (sys.executable, "-m", "tests.gpu.kernels", str(out))),
        Step("proof", 50, (*CADENZA, "info", *CARD, "--measure", "--json")),
        Step("verify bfloat16", 50, verify("--dtype", "bfloat16")),
        Step("verify float32", 50, verify("--dtype", "float32")),
        Step("verify int8", 50, verify(*int8)),
        Step("weights of 8B", 40, (sys.executable, "-m", "tests.gpu.eight_billion", shapes["8B"])),
        Step("throughput 8B", 110, throughput("8B")),
        Step("throughput 1B", 50, throughput("1B")),
        Step("throughput 135M", 40, throughput("135M")),
        Step("attention", 30, (*PROBES, "attention")),
        Step("served 135M", 60, (*PROBES, "served")),
        Step("host share", 30, (*PROBES, "host")),
        Step("kernel tests", 30, (*PROBES, "tests")),
    )


def run_step(step: Step, limit_s: float) -> Result:
    """The JSON that it prints last, its exit status and its time; else its last lines.

    What a step has started ends with it.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    try:
        text, errors = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        text, errors = _end(process)
    except BaseException:
        _end(process)
        raise
    finally:
        _signal(process, signal.SIGKILL)
    found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - started, 1)}
    lines = text.strip().splitlines()
    try:
        printed = json.loads(lines[-1]) if lines else None
    except ValueError:
        printed = None
    found["found"] = printed if isinstance(printed, dict) else None
    if code != 0 or found["found"] is None:
        found["tail"] = (text[-2000:] + errors[-4000:])[-4000:]
    return found


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Asks the process and what it has started to end, which make needs to drop a half written
    file; then kills them. What they printed."""
    _signal(process, signal.SIGTERM)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        return process.communicate()


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_all(out: Path, run: Callable[[Step, float], Result] = run_step) -> dict[str, Result]:
    """Each step within a time that leaves all later ones their limits: its own limit, and up to as
    much again of what earlier ones left. The files are written after each."""
    began, report = time.monotonic(), dict[str, Result]()
    every = steps(out)
    later_s = sum(each.limit_s for each in every)
    names = [each.name for each in every]
    for step in every:
        later_s -= step.limit_s
        left = ALL_S - (time.monotonic() - began) - later_s
        if report and not has_passed(KERNELS, report[KERNELS]):
            report[step.name] = {"exit": None, "skipped": "the kernels are not there"}
        elif left < 5:
            report[step.name] = {"exit": None, "skipped": "no time was left"}
        else:
            report[step.name] = run(step, min(2 * step.limit_s, left))
        print(f"{step.name}: {outcome(step.name, report[step.name])}", flush=True)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "result.json").write_text(json.dumps(result_of(report), indent=2) + "\n")
        (out / "report.md").write_text(format_report(names, report, progress(out)))
    return report


def result_of(report: Mapping[str, Result]) -> dict[str, Any]:
    """What was measured, in the form of docs/results; steps that failed have no figures."""
    found = {name: each.get("found") for name, each in report.items() if each.get("exit") == 0}
    figures: list[dict[str, Any]] = []
    for shape in ROWS:
        figures += _throughput_figures(shape, found.get(f"throughput {shape}"))
    served = found.get("served 135M")
    if served is not None:
        figures.append(
            _figure("135M shape, served", "tok/s", served["clients"], served["tok_s"], "clients")
        )
    attention = found.get("attention")
    if attention is not None:
        figures.append(
            _figure(
                "attention alone, share of the read rate",
                "%",
                attention["at"],
                attention["percent"],
            )
        )
    host = found.get("host share")
    if host is not None:
        figures.append(
            _figure("135M shape, host's part of a step", "ms", host["rows"], host["host_ms"])
        )
    device = (found.get(KERNELS) or {}).get("device", "NVIDIA GPU")
    verified = [
        f"{name.removeprefix('verify ')} {outcome(name, result)}"
        for name, result in report.items()
        if name.startswith("verify")
    ]
    return {
        "workload": f"kernels for GPUs, bfloat16, contexts of {CONTEXT} tokens",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"kind": _kind(device), "cpu": device, "cores": os.cpu_count()},
        "conditions": f"`tests/gpu/run.sh`; verify: {', '.join(verified) or 'not run'}",
        "engines": {"Cadenza": {"version": "", "command": "tests/gpu/run.sh"}},
        "figures": figures,
    }


def _throughput_figures(shape: str, found: Any) -> list[dict[str, Any]]:
    if found is None:
        return []
    results = found["results"]
    at = [str(each["concurrency"]) for each in results]
    figures = []
    for kind in ("decode", "prefill"):
        rates = [each[f"{kind}_tok_s"] for each in results]
        figures.append(_figure(f"{shape} shape, {kind}", "tok/s", at, rates))
        shares = [each.get(f"{kind}_share_of_bound") for each in results]
        if all(each is not None for each in shares):
            percent = [round(100 * each, 1) for each in shares]
            figures.append(_figure(f"{shape} shape, {kind}, share of the bound", "%", at, percent))
    return figures


def _figure(what: str, unit: str, at: Any, values: Any, of: str = "rows") -> dict[str, Any]:
    return {
        "what": what,
        "unit": unit,
        "at": [str(each) for each in at],
        "of": of,
        "values": {"Cadenza": list(values)},
    }


def _kind(device: str) -> str:
    """Such as "NVIDIA H100", by which docs/benchmarks.md groups."""
    return " ".join(device.split()[:2])


def main(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the step at hand ends, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    weights = out / "8b"
    shutil.rmtree(weights, ignore_errors=True)
    try:
        report = run_all(out)
    finally:
        shutil.rmtree(weights, ignore_errors=True)
    print((out / "report.md").read_text())
    return 0 if all(has_passed(name, result) for name, result in report.items()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
