"""Cadenza and llama.cpp on the same GGUF file, in turns, as a result file of docs/results.

    python -m benchmarks.rivals.beside_llama_cpp FILE.gguf OUT.json --llama BIN --kind "Zen 4" \\
        --model "Qwen3-4B" [--format "4 bits (Q4_K_M)"] [--rows 1,4,8] [--rounds 3]

BIN is the folder of `llama-batched-bench`, built for the machine. Each round runs both once, each
as a process of its own with one thread for each core. Decode is in tokens a second of all rows
together; prefill is the best rate of the round, whatever the number of prompts at once; memory is
the largest resident size, file pages included. Nothing else should run meanwhile.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.side_by_side import (
    Round,
    cadenza_round,
    decode_figures,
    machine_of,
    run_measured,
    threads,
    today,
    version_of,
)


def main() -> None:
    options = parse_arguments()
    rounds: dict[str, list[Round]] = {"Cadenza": [], "llama.cpp": []}
    for at in range(options.rounds):
        for name, run in (("Cadenza", our_round), ("llama.cpp", llama_round)):
            print(f"round {at + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            rounds[name].append(run(options))
            print(f"  {rounds[name][-1].decode} {rounds[name][-1].prefill:.1f}", file=sys.stderr)
    written = json.dumps(result(options, rounds), indent=2, ensure_ascii=False)
    options.out.write_text(written + "\n", encoding="utf-8")
    print(options.out)


def cadenza_command(options: argparse.Namespace) -> list[str]:
    return [
        *("cadenza", "bench", "throughput", str(options.file)),
        *("--input-len", str(options.input_len), "--output-len", str(options.output_len)),
        *("--concurrency", options.rows, "--repeats", "1", "--max-model-len", "2048"),
        *options.flags.split(),
    ]


def our_round(options: argparse.Namespace) -> Round:
    return cadenza_round(cadenza_command(options))


def llama_command(options: argparse.Namespace) -> list[str]:
    most = max(map(int, options.rows.split(",")))
    context = most * (options.input_len + options.output_len)
    return [
        *("llama-batched-bench", "-m", str(options.file), "-c", str(-(-context // 256) * 256)),
        *("-b", "512", "-ub", "512", "-npp", str(options.input_len)),
        *("-ntg", str(options.output_len), "-npl", options.rows, "-t", str(threads())),
    ]


def llama_round(options: argparse.Namespace) -> Round:
    name, *rest = llama_command(options)
    command = [str(options.llama / name), *rest, "--output-format", "jsonl"]
    output, memory_gb = run_measured(command, {"LD_LIBRARY_PATH": str(options.llama)})
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Round(
        decode=[each["speed_tg"] for each in found],
        prefill=max(each["speed_pp"] for each in found),
        memory_gb=memory_gb,
    )


def result(options: argparse.Namespace, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """The members of a result file; see tools/result_tables.py."""
    ours, size = rounds["Cadenza"], options.file.stat().st_size / 1e9
    return {
        "workload": f"{options.model}, {options.format}, {size:.1f} GB, {options.input_len} "
        f"tokens in, {options.output_len} out",
        "model": {"name": options.model, "file": options.format, "gb": round(size, 1)},
        "date": today(),
        "machine": machine_of(ours, options.kind, options.cpu),
        "conditions": f"{options.conditions}, in turns, rounds: {options.rounds}",
        "engines": {
            "Cadenza": {
                "version": version_of(ours),
                "command": shown(cadenza_command(options)),
            },
            "llama.cpp": {"version": options.version, "command": shown(llama_command(options))},
        },
        "figures": [
            *decode_figures(options.rows.split(","), rounds),
            single("prefill", "tok/s", rounds, lambda each: each.prefill),
            single("memory", "GB", rounds, lambda each: each.memory_gb),
        ],
    }


def single(
    what: str, unit: str, rounds: Mapping[str, Sequence[Round]], value: Callable[[Round], float]
) -> dict[str, Any]:
    values = {
        name: [round(statistics.median(map(value, runs)), 1)] for name, runs in rounds.items()
    }
    return {"what": what, "unit": unit, "values": values}


def shown(command: Sequence[str]) -> str:
    """Without the folder of the model's file."""
    return " ".join("FILE.gguf" if each.endswith(".gguf") else each for each in command)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama-batched-bench")
    parser.add_argument("--version", default="built for the machine", help="of llama.cpp")
    parser.add_argument("--kind", required=True, help="the machine's kind in docs/benchmarks.md")
    parser.add_argument("--cpu", help="the machine's name there")
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", default="4 bits (Q4_K_M)")
    parser.add_argument("--conditions", default="random weights")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags of cadenza bench throughput")
    return parser.parse_args()


if __name__ == "__main__":
    main()
