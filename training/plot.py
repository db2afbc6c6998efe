"""Plots a run's losses and saves the record next to the picture.

Run as `python -m training.plot` from the root of the repository.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from training.batches import TOKENS_OF_A_STEP
from training.train import RUN_FOLDER, write_json

FOLDER = Path(__file__).parent


def draw(record: list[dict[str, float]], path: Path) -> None:
    tokens = [entry["step"] * TOKENS_OF_A_STEP / 1e6 for entry in record]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(tokens, [entry["train_loss"] for entry in record], label="train", linewidth=1.2)
    axes.plot(tokens, [entry["held_out_loss"] for entry in record], label="held out", linewidth=2)
    axes.set_xlabel("tokens trained on (millions)")
    axes.set_ylabel("loss of learned tokens (nats)")
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    axes.set_title("Training of the bundled model")
    figure.savefig(path, dpi=120)


def continued(earlier: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The progress of a run that started from another run's last weights, behind the other's."""
    last = earlier["record"][-1]["step"]
    later = [entry | {"step": entry["step"] + last} for entry in run["record"]]
    return {
        "seconds": earlier["seconds"] + run["seconds"],
        "record": earlier["record"] + later,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=RUN_FOLDER)
    parser.add_argument("--after", type=Path, help="curve.json of the run that this one continues")
    arguments = parser.parse_args()
    progress = json.loads((arguments.run / "progress.json").read_text(encoding="utf-8"))
    if arguments.after is not None:
        progress = continued(json.loads(arguments.after.read_text(encoding="utf-8")), progress)
    write_json(FOLDER / "curve.json", progress)
    draw(progress["record"], FOLDER / "curve.png")


if __name__ == "__main__":
    main()
