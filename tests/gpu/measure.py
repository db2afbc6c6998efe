"""Runs the steps of run.sh, and writes their results after each: `result.json` and `report.json`.

A step is a command with a time limit, whose output is a JSON object; what it could not show is in
the report with its last lines.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CADENZA = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")
PROBES = (sys.executable, "-m", "tests.gpu.probes")
CARD = ("--device", "cuda", "--ops", "cuda")
ALL_S = 470
"""Of all steps together."""

CONTEXT = 1024
ROWS = {"8B": "1,8,64,256", "1B": "1,8,64", "135M": "1,8,64"}

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    limit_s: int
    command: tuple[str, ...]


def steps(out: Path) -> tuple[Step, ...]:
    """In the order of what matters most."""
    shapes = {"8B": str(out / "8b"), "1B": "llama-3.2-1b", "135M": "smollm2-135m"}

    def throughput(name: str, *more: str) -> tuple[str, ...]:
        model = (shapes[name],) if name == "8B" else ("--shape", shapes[name])
        lengths = ("--input-len", str(CONTEXT), "--output-len", "32", "--repeats", "1")
        common = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.9", "--json")
        return (*CADENZA, "bench", "throughput", *model, *CARD, *lengths, *common, *more)

    verify = (*CADENZA, "verify", *CARD, "--json")
    return (
        Step("proof", 60, (*CADENZA, "info", *CARD, "--measure", "--json")),
        Step("weights of 8B", 60, (sys.executable, "-m", "tests.gpu.eight_billion", shapes["8B"])),
        Step("throughput 8B", 120, throughput("8B", "--concurrency", ROWS["8B"])),
        Step("verify bfloat16", 50, (*verify, "--dtype", "bfloat16")),
        Step("attention", 40, (*PROBES, "attention")),
        Step("verify float32", 50, (*verify, "--dtype", "float32")),
        Step(
            "verify int8",
            50,
            (*verify, "--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8"),
        ),
        Step("kernel tests", 60, (*PROBES, "tests")),
        Step("host share", 40, (*PROBES, "host")),
        Step("served 135M", 90, (*PROBES, "served")),
        Step("throughput 1B", 60, throughput("1B", "--concurrency", ROWS["1B"])),
        Step("throughput 135M", 50, throughput("135M", "--concurrency", ROWS["135M"])),
    )


def run_step(step: Step, limit_s: float) -> Result:
    """The JSON that it prints last, its exit status and its time; else its last lines."""
    started = time.monotonic()
    try:
        ran = subprocess.run(
            step.command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        code, text, errors = ran.returncode, ran.stdout, ran.stderr
    except subprocess.TimeoutExpired as error:
        code, text, errors = None, "", str(error.stderr or "")
    found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - started, 1)}
    lines = text.strip().splitlines()
    try:
        found["found"] = json.loads(lines[-1]) if lines else None
    except ValueError:
        found["found"] = None
    if code != 0 or found["found"] is None:
        found["tail"] = (text[-2000:] + errors[-4000:])[-4000:]
    return found


def run_all(out: Path, run: Callable[[Step, float], Result] = run_step) -> dict[str, Result]:
    """Each step within its limit and what is left of all; the files are written after each."""
    began, report = time.monotonic(), dict[str, Result]()
    for step in steps(out):
        left = ALL_S - (time.monotonic() - began)
        report[step.name] = (
            {"exit": None, "skipped": True} if left < 10 else run(step, min(step.limit_s, left))
        )
        shown = {key: value for key, value in report[step.name].items() if key != "found"}
        print(f"{step.name}: {shown}", flush=True)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "result.json").write_text(json.dumps(result_of(report), indent=2) + "\n")
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
    device = next((each["device"] for each in (attention, host) if each is not None), "NVIDIA GPU")
    verified = [name for name in report if name.startswith("verify") and report[name]["exit"] == 0]
    return {
        "workload": f"kernels for GPUs, bfloat16, contexts of {CONTEXT} tokens",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"kind": _kind(device), "cpu": device, "cores": os.cpu_count()},
        "conditions": f"`tests/gpu/run.sh`; passed: {', '.join(verified) or 'none of verify'}",
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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    reports = run_all(folder)
    shutil.rmtree(folder / "8b", ignore_errors=True)
    sys.exit(0 if all(each.get("exit") == 0 for each in reports.values()) else 1)
