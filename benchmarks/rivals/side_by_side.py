"""What comparisons with another engine share: an engine's round, and parts of the result file."""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of one engine. Shares are in percent of the bound, memory is resident at most."""

    decode: list[float]  # for each number of rows
    prefill: float
    memory_gb: float = 0.0
    share: list[float] | None = None
    machine: dict[str, Any] | None = None
    roofline: dict[str, Any] | None = None


def cadenza_round(command: Sequence[str]) -> Round:
    """A run of `cadenza bench throughput`, installed beside this Python."""
    name, *rest = command
    output, memory_gb = run_measured([str(Path(sys.executable).with_name(name)), *rest, "--json"])
    found = json.loads(output)
    results = found["results"]
    return Round(
        decode=[each["decode_tok_s"] for each in results],
        prefill=max(each["prefill_tok_s"] for each in results),
        memory_gb=memory_gb,
        share=[100 * each["decode_share_of_bound"] for each in results],
        machine=found["machine"],
        roofline=found["roofline"],
    )


def run_measured(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[str, float]:
    """The output of a process and its largest resident size in GB. Exits with its error."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            sys.exit(f"{' '.join(command)}\n{errors.read()[-2000:]}")
    return output, usage.ru_maxrss * 1024 / 1e9


def threads() -> int:
    return len(os.sched_getaffinity(0))


def machine_of(rounds: Sequence[Round], kind: str, cpu: str | None = None) -> dict[str, Any]:
    """The machine as a result file names it, with its rates in Cadenza's rounds."""
    machine = rounds[0].machine or {}
    rooflines = [each.roofline for each in rounds if each.roofline]
    reads = [each["read_gb_s"] for each in rooflines]
    return {
        "kind": kind,
        "cpu": cpu or f"{machine.get('cpu')} ({machine.get('isa')})",
        "cores": threads(),
        "memory": f"{min(reads):.0f} to {max(reads):.0f} GB/s",
        "multiply": f"{max(each['gflop_s'] for each in rooflines):.0f} G operations/s",
    }


def version_of(rounds: Sequence[Round]) -> str:
    machine = rounds[0].machine or {}
    return f"jax {machine.get('jax')}, Python {machine.get('python')}"


def decode_figures(rows: Sequence[str], rounds: Mapping[str, Sequence[Round]]) -> list[Any]:
    """Decode of each engine and Cadenza's share of the bound; see tools/result_tables.py."""
    places = range(len(rows))
    decode = {
        name: [[round(each.decode[at], 1) for each in runs] for at in places]
        for name, runs in rounds.items()
    }
    shares = [[round(each.share[at]) for each in rounds["Cadenza"] if each.share] for at in places]
    of_rows = {"at": list(rows), "of": "rows"}
    return [
        {"what": "decode", "unit": "tok/s", **of_rows, "values": decode},
        {
            "what": "decode, share of the bound",
            "unit": "%",
            **of_rows,
            "values": {"Cadenza": shares},
        },
    ]


def today() -> str:
    return str(datetime.datetime.now(tz=datetime.UTC).date())
