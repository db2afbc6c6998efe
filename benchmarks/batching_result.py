"""Makes a result file of what `cadenza bench batching` printed.

    cadenza bench batching --setting A --shape smollm2-135m --json > a.json
    python -m benchmarks.batching_result a.json docs/results/zen4-batching-a.json --kind "Zen 4" \\
        --shape "135M shape" --conditions "medians of 3 rounds" \\
        --command "cadenza bench batching --setting A --shape smollm2-135m"

The file holds the whole report, too. A ratio is that of the two figures it names.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.side_by_side import today

TITLES = {
    "A": "8 prompts of 128 tokens, 64 out",
    "B": "prompts of 32 to 512 tokens, 16 to 256 out, all at once",
    "C": "one answer of 512 in ten, the others of 8 to 16, all at once",
    "D": "questions of 64 tokens behind a system prompt of {system_len:,}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes a result file of bench batching's JSON.")
    parser.add_argument("report", type=Path, help="what the command printed")
    parser.add_argument("out", type=Path, help="a result file")
    parser.add_argument("--kind", required=True, help="the machine's kind in docs/benchmarks.md")
    parser.add_argument("--cpu", help="the machine's name there")
    parser.add_argument("--shape", required=True, help="the shape, as the page names it")
    parser.add_argument("--command", required=True, help="the command, without --json")
    parser.add_argument("--conditions", default="", help="how it was measured")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    written = json.dumps(result(report, options), indent=2, ensure_ascii=False)
    # The report on one line: it is kept for what the figures leave out.
    whole = f'{written[:-2]},\n  "report": {json.dumps(report, ensure_ascii=False)}\n}}\n'
    options.out.write_text(whole, encoding="utf-8")


def result(report: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The result file; see tools/result_tables.py."""
    workload, machine = report["workload"], report["machine"]
    setting, rows = workload["setting"], workload["rows"]
    title = TITLES[setting].format(system_len=workload["system_len"])
    return {
        "workload": f"batching {setting}, {options.shape}, {rows} rows: {title}",
        "date": today(),
        "machine": {
            "kind": options.kind,
            "cpu": options.cpu or f"{machine['cpu']} ({machine['isa']})",
            "cores": machine["cores"],
        },
        "conditions": options.conditions,
        "engines": {
            "Cadenza": {
                "version": f"jax {machine['jax']}, Python {machine['python']}",
                "command": options.command,
            }
        },
        "figures": [*mode_figures(report), *map(bar_figure, report["bars"])],
    }


def mode_figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each mode tokens a second and the mean time to the first token, by load."""
    workload, results = report["workload"], report["results"]
    loads: dict[str, Any] = {}
    if len(workload["loads"]) > 1:
        counts = [str(each["clients"]) for each in results if each["mode"] == "continuous"]
        loads = {"at": counts, "of": "clients"}
    found: list[dict[str, Any]] = []
    for mode in workload["modes"]:
        own = [each for each in results if each["mode"] == mode]
        rates = [[round(one, 1) for one in each["tok_s_runs"]] for each in own]
        times = [round(1000 * each["ttft"]["mean_s"], 1) for each in own]
        found += [
            {"what": mode, "unit": "tok/s", **loads, "values": {"Cadenza": rates}},
            {"what": f"{mode}, mean TTFT", "unit": "ms", **loads, "values": {"Cadenza": times}},
        ]
        if own[0]["full_tok_s_runs"]:
            full = {"Cadenza": [[round(one, 1) for one in own[0]["full_tok_s_runs"]]]}
            what = f"{mode}, while requests wait"
            found.append({"what": what, "unit": "tok/s", "values": full})
    return found


def bar_figure(bar: dict[str, Any]) -> dict[str, Any]:
    """A ratio, with what it is held to."""
    beside = [f"bar {bar['required']:.2f}", bar["verdict"].replace("miss", "**miss**")]
    beside += [f"{name} {bar[name]:.2f}" for name in ("ideal", "allowed") if bar[name] is not None]
    beside += [f"claimed elsewhere {bar['claim']}"] if bar["claim"] is not None else []
    what = f"{bar['what']} ({', '.join(beside)})"
    return {"what": what, "unit": "×", "values": {"Cadenza": [round(bar["ratio"], 2)]}}


if __name__ == "__main__":
    main()
