"""Runs the steps of run.sh; writes `report.md`, `report.json` and `result.json` after each.

A step is a command with a time limit, whose output is a JSON object; what it could not show is in
the report with its last lines. Steps whose time is no result run side by side.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gpu.kernels import progress
from tests.gpu.report import Result, format_report, has_passed, outcome

ROOT = Path(__file__).resolve().parents[2]
CADENZA = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")
PROBES = (sys.executable, "-m", "tests.gpu.probes")
PROFILE = (sys.executable, "-m", "tests.gpu.profile")
CHECKS = (sys.executable, "-m", "tests.gpu.checks")
CARD = ("--device", "cuda", "--ops", "cuda")
ALL_S = 595  # of all stages together: the limits add up to it

# The environment of each process that shares the card.
BESIDE_OTHERS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.05"}

KERNELS = "kernels"  # the step that all others need
KERNELS_S, UNTIMED_S = 190, 110

CONTEXT = 1024
ROWS = {"8B": "1,8,64,256", "1B": "1,8,64,256", "135M": "1,8,64,256"}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    limit_s: int
    command: tuple[str, ...]
    is_beside_others: bool = False


def steps(out: Path) -> tuple[Step, ...]:
    """In the order of what matters most."""
    return tuple(step for stage in stages(out) for step in stage)


def stages(out: Path) -> tuple[tuple[Step, ...], ...]:
    """The steps of a stage run side by side; those that are timed have one of their own."""
    kernels = (sys.executable, "-m", "tests.gpu.kernels", str(out), str(KERNELS_S - 10))
    return ((Step(KERNELS, KERNELS_S, kernels),), _untimed(out), *((x,) for x in _timed(out)))


def _untimed(out: Path) -> tuple[Step, ...]:
    def verify(*options: str) -> tuple[str, ...]:
        return (*CADENZA, "verify", *CARD, "--json", *options)

    int8 = ("--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8")
    eight_billion = (sys.executable, "-m", "tests.gpu.eight_billion")
    commands = {
        "proof": (*CADENZA, "info", *CARD, "--measure", "--json"),
        "verify bfloat16": verify("--dtype", "bfloat16"),
        "verify float32": verify("--dtype", "float32"),
        "verify int8": verify(*int8),
        "self-test": (*CHECKS, "self-test"),
        "verify families": (*CHECKS, "families"),
        "kernel tests": (*CHECKS, "tests"),
        "weights of 8B": (*eight_billion, str(out / "8b")),
        "weights of 8B, 8 layers": (*eight_billion, str(out / "8b-layers"), "8"),
        "weights of 1B and 135M": (*CHECKS, "weights"),
    }
    return tuple(Step(name, UNTIMED_S, each, True) for name, each in commands.items())


def _timed(out: Path) -> tuple[Step, ...]:
    shapes = {"8B": str(out / "8b"), "1B": "llama-3.2-1b", "135M": "smollm2-135m"}

    def throughput(name: str) -> tuple[str, ...]:
        model = (shapes[name],) if name == "8B" else ("--shape", shapes[name])
        lengths = ("--input-len", str(CONTEXT), "--output-len", "32", "--repeats", "1")
        common = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.9", "--json")
        rows = ("--concurrency", ROWS[name])
        return (*CADENZA, "bench", "throughput", *model, *CARD, *lengths, *common, *rows)

    return (
        Step("throughput 8B", 95, throughput("8B")),
        Step("throughput 1B", 40, throughput("1B")),
        Step("throughput 135M", 30, throughput("135M")),
        Step("attention", 20, (*PROBES, "attention")),
        Step("served 135M", 45, (*PROBES, "served")),
        Step("host share", 25, (*PROBES, "host")),
        Step("kernel profile", 40, (*PROFILE, str(out / "8b-layers"), str(out / "kernels.json"))),
    )


def run_step(step: Step, limit_s: float) -> Result:
    """The JSON that it prints last, its exit status and its time; else its last lines.

    What a step has started ends with it.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=os.environ | BESIDE_OTHERS if step.is_beside_others else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    _RUNNING.add(process)
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
        _RUNNING.discard(process)
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


_RUNNING: set[subprocess.Popen[str]] = set()


def _end_all() -> None:
    processes = [*_RUNNING]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            _signal(process, number)
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(timeout=5)


Run = Callable[[Step, float], Result]


def run_all(out: Path, run: Run = run_step) -> dict[str, Result]:
    """Each stage within a time that leaves all later ones their limits: its own limit, and up to as
    much again of what earlier ones left. The files are written after each step."""
    began, report = time.monotonic(), dict[str, Result]()
    every = stages(out)
    later_s = sum(_limit_s(stage) for stage in every)
    for stage in every:
        later_s -= _limit_s(stage)
        left = ALL_S - (time.monotonic() - began) - later_s
        limit_s = min(2 * _limit_s(stage), left)
        with closing(_run_stage(stage, limit_s, run, report)) as results:
            for step, result in results:
                report[step.name] = result
                print(f"{step.name}: {outcome(step.name, result)}", flush=True)
                _write(out, report)
    return report


def _limit_s(stage: Sequence[Step]) -> int:
    return max(each.limit_s for each in stage)


def _run_stage(
    stage: Sequence[Step], limit_s: float, run: Run, report: Mapping[str, Result]
) -> Generator[tuple[Step, Result]]:
    why = "no time was left" if limit_s < 5 else None
    if report and not has_passed(KERNELS, report[KERNELS]):
        why = "the kernels are not there"
    if why is not None:
        yield from ((step, {"exit": None, "skipped": why}) for step in stage)
        return
    if len(stage) == 1:
        yield stage[0], run(stage[0], limit_s)
        return
    with ThreadPoolExecutor(len(stage)) as pool:
        running = {pool.submit(run, step, limit_s): step for step in stage}
        try:
            for each in as_completed(running):
                yield running[each], each.result()
        except BaseException:
            while wait(running, timeout=0.1).not_done:  # some may be just being started
                _end_all()
            raise


def _write(out: Path, found: Mapping[str, Result]) -> None:
    names = [each.name for each in steps(out)]
    report = {name: found[name] for name in names if name in found}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "result.json").write_text(json.dumps(result_of(report), indent=2) + "\n")
    (out / "report.md").write_text(format_report(names, report, progress(out)))


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
        if name.startswith(("verify", "self-test"))
    ]
    return {
        "workload": f"kernels for GPUs, bfloat16, contexts of {CONTEXT} tokens",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"kind": _kind(device), "cpu": device, "cores": os.cpu_count()},
        "conditions": f"`tests/gpu/run.sh`; verify: {', '.join(verified) or 'not run'}",
        "engines": {"Cadenza": {"version": _versions(), "command": "tests/gpu/run.sh"}},
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


def _versions() -> str:
    return f"jax {version('jax')}, Python {platform.python_version()}"


def _kind(device: str) -> str:
    """Such as "NVIDIA H100", by which docs/benchmarks.md groups."""
    return " ".join(device.split()[:2])


def main(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the step at hand ends, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    _drop_weights(out)
    try:
        report = run_all(out)
    finally:
        _drop_weights(out)
    print((out / "report.md").read_text())
    return 0 if all(has_passed(name, result) for name, result in report.items()) else 1


def _drop_weights(out: Path) -> None:
    for name in ("8b", "8b-layers"):
        shutil.rmtree(out / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
