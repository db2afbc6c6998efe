"""Decode throughput of two engines on one machine, compared with one engine alone.

    python benchmarks/two_engines.py [--shape smollm2-135m] [--concurrency 8]

Runs `cadenza bench throughput` once alone, then twice at the same time, and prints each decode rate
as a share of the rate alone. An even split is 50 %; spinning threads would lower both.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

FLAGS = ["--input-len", "64", "--output-len", "64", "--repeats", "5", "--json"]
TIMEOUT_S = 900


def start(shape: str, concurrency: int) -> subprocess.Popen[str]:
    code = "from cadenza.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "throughput", "--shape", shape]
    command += ["--concurrency", str(concurrency), *FLAGS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def rate_of(process: subprocess.Popen[str]) -> float:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    result: dict[str, Any] = json.loads(output)
    return float(result["results"][0]["decode_tok_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    alone = rate_of(start(arguments.shape, arguments.concurrency))
    print(f"alone     {alone:8.1f} tok/s")
    pair = [start(arguments.shape, arguments.concurrency) for _ in range(2)]
    for process in pair:
        rate = rate_of(process)
        print(f"together  {rate:8.1f} tok/s, {rate / alone:.0%}")


if __name__ == "__main__":
    main()
