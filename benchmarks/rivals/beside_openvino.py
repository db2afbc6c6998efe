"""Cadenza and OpenVINO on one shape in turns, with the ratios of their rates, as result files.

    python3 -m venv OV
    OV/bin/pip install openvino-genai==2026.4 optimum-intel nncf
    echo '{"tokenizer_class": "PreTrainedTokenizerFast"}' > FOLDER/tokenizer_config.json
    export="OV/bin/optimum-cli export openvino -m FOLDER --task text-generation-with-past"
    $export --weight-format fp16 FOLDER-bf16
    $export --weight-format int8 FOLDER-int8
    python -m benchmarks.rivals.beside_openvino FOLDER OUT --openvino OV/bin/python --shape 135M

FOLDER has random weights of a shape: `cadenza bench make-checkpoint --shape smollm2-135m FOLDER`,
or `llama-3.2-1b` with `--shape 1B`. OpenVINO computes in bfloat16 where the CPU has AMX, whatever
type weights are stored in. Each round runs both engines once, each in a process of its own, with
one thread for each core; nothing else should run meanwhile. Decode is in tokens a second of all
rows together, prefill the best rate of the round. Written are OUT/SHAPE-bfloat16.json and
OUT/SHAPE-int8.json, in the form of docs/results; printed is each ratio beside the bar that it has
to reach. The exit status is 1 if one does not, or if the table of kernels that ran is not `amx`.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rivals.side_by_side import (
    Round,
    cadenza_round,
    decode_figures,
    machine_of,
    run_measured,
    today,
    version_of,
)

RIVAL = Path(__file__).with_name("openvino_batched.py")
LINE = re.compile(r" *(\d+) rows: decode +([\d.]+) tok/s, prefill +([\d.]+) tok/s")
ISA = "amx"

PREFILL_BAR = 1.15
DECODE_BARS = {"1": 1.5, "4": 1.5, "8": 1.5, "32": 1.15}
SHARE_BARS = {"135M": 50.0, "1B": 80.0}
"""In percent of the bound, at `SHARE_ROWS` rows in bfloat16."""
SHARE_ROWS = "32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rounds of both engines in one type of weights."""

    type: str
    rows: tuple[str, ...]
    ours: Sequence[Round]
    theirs: Sequence[Round]

    def ratio(self, at: int) -> float:
        """Of the medians of decode at one number of rows."""
        ours, theirs = ([each.decode[at] for each in runs] for runs in (self.ours, self.theirs))
        return statistics.median(ours) / statistics.median(theirs)

    @property
    def prefill_ratio(self) -> float:
        ours, theirs = ([each.prefill for each in runs] for runs in (self.ours, self.theirs))
        return statistics.median(ours) / statistics.median(theirs)

    def share(self, at: int) -> float:
        return statistics.median(each.share[at] for each in self.ours if each.share is not None)

    @property
    def isa(self) -> str:
        return str((self.ours[0].machine or {}).get("isa"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A figure beside what it has to reach; None where there is no bar."""

    what: str
    found: float
    bar: float | None

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.found >= self.bar

    def __str__(self) -> str:
        asked = (
            "" if self.bar is None else f", at least {self.bar:g}: {'yes' if self.is_met else 'NO'}"
        )
        return f"{self.what}: {self.found:.2f}{asked}"


def main() -> int:
    options = parse_arguments()
    is_met = True
    options.out.mkdir(parents=True, exist_ok=True)
    for type in options.types.split(","):
        comparison = compare(options, type)
        path = options.out / f"{options.shape}-{type}.json"
        written = json.dumps(result(options, comparison), indent=2, ensure_ascii=False)
        path.write_text(written + "\n", encoding="utf-8")
        print(f"{options.shape} in {type}, kernels {comparison.isa}: {path}")
        for verdict in judge(options.shape, comparison):
            print(f"  {verdict}")
            is_met &= verdict.is_met
        if comparison.isa != ISA:
            print(f"  the table of kernels is {comparison.isa}, not {ISA}: see `cadenza info`")
            is_met = False
    return 0 if is_met else 1


def judge(shape: str, comparison: Comparison) -> list[Verdict]:
    """The ratios to the rival, and the shares of the bound."""
    found = [Verdict(what="prefill ratio", found=comparison.prefill_ratio, bar=PREFILL_BAR)]
    for at, rows in enumerate(comparison.rows):
        what = f"decode ratio at {rows} rows"
        found.append(Verdict(what=what, found=comparison.ratio(at), bar=DECODE_BARS.get(rows)))
    for at, rows in enumerate(comparison.rows):
        has_bar = rows == SHARE_ROWS and comparison.type == "bfloat16"
        what = f"decode at {rows} rows, percent of the bound"
        bar = SHARE_BARS.get(shape) if has_bar else None
        found.append(Verdict(what=what, found=comparison.share(at), bar=bar))
    return found


def compare(options: argparse.Namespace, type: str) -> Comparison:
    ours: list[Round] = []
    theirs: list[Round] = []
    for at in range(options.rounds):
        for name, run, rounds in (("Cadenza", our_round, ours), ("OpenVINO", their_round, theirs)):
            print(
                f"{type}, round {at + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True
            )
            rounds.append(run(options, type))
            print(f"  {rounds[-1].decode} {rounds[-1].prefill:.1f}", file=sys.stderr, flush=True)
    return Comparison(type=type, rows=tuple(options.rows.split(",")), ours=ours, theirs=theirs)


def our_command(options: argparse.Namespace, type: str) -> list[str]:
    return [
        *("cadenza", "bench", "throughput", str(options.folder), "--dtype", "bfloat16"),
        *(("--quantization", "int8") if type == "int8" else ()),
        *("--input-len", str(options.input_len), "--output-len", str(options.output_len)),
        *("--concurrency", options.rows, "--repeats", "1"),
    ]


def our_round(options: argparse.Namespace, type: str) -> Round:
    return cadenza_round(our_command(options, type))


def their_folder(options: argparse.Namespace, type: str) -> Path:
    suffix = "bf16" if type == "bfloat16" else type
    return options.folder.with_name(f"{options.folder.name}-{suffix}")


def their_command(options: argparse.Namespace, type: str) -> list[str]:
    return [
        *(str(options.openvino), str(RIVAL), str(their_folder(options, type))),
        *("--rows", options.rows, "--prompt-tokens", str(options.input_len)),
        *("--new-tokens", str(options.output_len)),
    ]


def their_round(options: argparse.Namespace, type: str) -> Round:
    output, _ = run_measured(their_command(options, type))
    return read_rival(output, options.rows.split(","))


def read_rival(output: str, rows: Sequence[str]) -> Round:
    """The round in what `openvino_batched.py` printed. Exits where a number of rows is missing."""
    lines = {found[1]: found for found in map(LINE.match, output.splitlines()) if found is not None}
    missing = [each for each in rows if each not in lines]
    if missing:
        sys.exit(f"{RIVAL.name} printed nothing for {', '.join(missing)} rows:\n{output}")
    return Round(
        decode=[float(lines[each][2]) for each in rows],
        prefill=max(float(lines[each][3]) for each in rows),
    )


def result(options: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """The members of a result file; see tools/result_tables.py."""
    engines = {"Cadenza": comparison.ours, "OpenVINO": comparison.theirs}
    prefill = {name: [[round(each.prefill, 1) for each in runs]] for name, runs in engines.items()}
    return {
        "workload": f"{options.shape} shape, {comparison.type}, {options.input_len} tokens in, "
        f"{options.output_len} out",
        "date": today(),
        "machine": machine_of(comparison.ours, options.kind),
        "conditions": f"{options.conditions}, {options.rounds} rounds in turns",
        "engines": {
            "Cadenza": {
                "version": version_of(comparison.ours),
                "command": shown(our_command(options, comparison.type)),
            },
            "OpenVINO": {
                "version": options.version,
                "command": shown(their_command(options, comparison.type)),
            },
        },
        "figures": [
            *decode_figures(comparison.rows, engines),
            {"what": "prefill", "unit": "tok/s", "values": prefill},
        ],
    }


def shown(command: Sequence[str]) -> str:
    """Without the folders of this machine."""
    return " ".join(Path(each).name if "/" in each else each for each in command)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint; OpenVINO's lie beside it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--openvino", type=Path, required=True, help="Python with openvino-genai")
    parser.add_argument("--version", default="OpenVINO GenAI 2026.4")
    parser.add_argument("--shape", required=True, help="135M, 1B, or another name, without bars")
    parser.add_argument("--kind", default="Intel", help="the machine's kind in docs/benchmarks.md")
    parser.add_argument("--conditions", default="random weights")
    parser.add_argument("--types", default="bfloat16,int8")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
