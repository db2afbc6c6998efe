"""Times to the first token with sparse prefill beside the cost model: a 1B shape, two drafts.

    python benchmarks/spec_prefill.py FOLDER [--input-len 4096,8192,32768] [--keep 0.3,0.1]
        [--repeats 1] [--draft draft-wide-of-1b] [--processor-time]

Each pair of a draft and a length is one run of `cadenza bench spec-prefill` with random weights,
which takes minutes; its JSON is kept in FOLDER, and a run that is there already is not repeated, so
that an interrupted one goes on. The table has, by draft, length and fraction: the measured ratio of
the times, that of the cost model, and the first over the second. The models' shapes are those of
Llama-3.2-1B, and of `benchmarks/shapes`: SmolLM2-135M's with its vocabulary and context, and four
wide layers.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from serving import COMMAND

SHAPES = Path(__file__).parent / "shapes"
TARGET = "llama-3.2-1b"
DRAFTS = ("draft-135m-of-1b", "draft-wide-of-1b")
ROOM = 64


def measured(folder: Path, draft: str, length: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The JSON of a run, which is made where it is not there."""
    file = folder / f"{draft}-{length}.json"
    if not file.exists():
        command = [*COMMAND, "bench", "spec-prefill", "--json"]
        command += ["--shape", TARGET, "--draft-shape", str(SHAPES / f"{draft}.json")]
        command += ["--input-len", str(length), "--keep", asked.keep, "--samples", "0"]
        command += ["--repeats", str(asked.repeats), "--max-num-seqs", "2"]
        command += ["--max-model-len", str(length + ROOM)]
        command += ["--processor-time"] if asked.processor_time else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        file.write_bytes(done.stdout)
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--input-len", default="4096,8192,32768")
    parser.add_argument("--keep", default="0.3,0.1")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--draft", choices=DRAFTS)
    parser.add_argument("--processor-time", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    print("draft               tokens   keep   whole s  thinned s   ratio  predicted  of that")
    for length in map(int, asked.input_len.split(",")):
        for draft in DRAFTS if asked.draft is None else (asked.draft,):
            for row in measured(asked.folder, draft, length, asked)["results"]:
                ratio, predicted = row["ttft_ratio"], row["predicted_ratio"]
                print(
                    f"{draft:18} {length:7} {row['keep']:6g} {row['whole_ttft_s']:9.2f} "
                    f"{row['thinned_ttft_s']:10.2f} {ratio:7.2f} {predicted:10.2f} "
                    f"{ratio / predicted:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
