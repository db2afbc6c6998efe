"""Trains the bundled model that sees.

Owns its seed, its objectives and what its batches are; steps, checkpoints and record are those of
`training.train`.  There are two runs, since the text model takes most of the time and learns
little before image tokens say what they show: `tower` learns what is at the middle of each image
token's cell; `text` learns answers over that tower, which stays as it is.

Run as `python -m training.vision.train RUN` from the root of the repository; `--resume` continues
from the last checkpoint of the run.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp

from training.corpus.example import Split
from training.model import Weights
from training.train import (
    RUN_FOLDER,
    Batch,
    Feed,
    Figures,
    Objective,
    Plan,
    add_plan_arguments,
    load_saved,
    make_plan,
    train,
    write_json,
)
from training.vision.dialogues import make_batch, make_images
from training.vision.model import (
    SEEING_PARTS,
    as_batch,
    cell_losses,
    init_seeing,
    losses_of,
)
from training.vision.shape import TEXT_SHAPE, TowerShape
from training.vision.tokenizer import load_vision_tokenizer

SEED = 46
DEFAULT_STEPS = 3000
DEFAULT_RATE = 2e-3
HELD_OUT_BATCHES = 3
VISION_RUN_FOLDER = RUN_FOLDER / "vision"


def seeing_objective(parts: Weights) -> Objective:
    """The text model predicts the answers, over frozen weights of `SEEING_PARTS`."""

    def losses(weights: Weights, frozen: Weights, batch: Batch) -> Figures:
        return losses_of(weights | frozen, batch, TEXT_SHAPE, TowerShape())

    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        return losses(weights, frozen, batch)["text"]

    def figures(weights: Weights, frozen: Weights, batch: Batch) -> Figures:
        found = losses(weights, frozen, batch)
        return {
            "held_out_loss": found["text"],
            "held_out_cells": found["cells"],
            "held_out_matches": found["matches"],
        }

    return Objective(loss=loss, figures=figures, frozen=parts, feed=seeing_feed)


def tower_objective() -> Objective:
    """Says what is at the middle of each image token's cell."""

    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        assert not frozen, "all weights are trained"
        return cell_losses(weights, batch, TowerShape())["cells"]

    def figures(weights: Weights, _: Weights, batch: Batch) -> Figures:
        found = cell_losses(weights, batch, TowerShape())
        return {"held_out_loss": found["cells"], "held_out_kinds": found["kinds"]}

    return Objective(loss=loss, figures=figures, feed=image_feed)


def image_feed(_: Plan) -> Feed:
    return Feed(
        training=lambda step: as_batch(make_images(Split.TRAIN, (SEED, step))),
        held_out=[as_batch(make_images(Split.HELD_OUT, i)) for i in range(HELD_OUT_BATCHES)],
    )


def seeing_feed(_: Plan) -> Feed:
    tokenizer = load_vision_tokenizer()
    return Feed(
        training=lambda step: as_batch(make_batch(tokenizer, Split.TRAIN, (SEED, step))),
        held_out=[
            as_batch(make_batch(tokenizer, Split.HELD_OUT, i)) for i in range(HELD_OUT_BATCHES)
        ],
    )


def main() -> None:
    arguments = _parse_arguments()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(arguments, num_steps=DEFAULT_STEPS, learning_rate=DEFAULT_RATE)
    shapes = {"text": asdict(TEXT_SHAPE), "tower": asdict(TowerShape())}
    write_json(folder / "plan.json", {"shape": shapes, "plan": asdict(plan)})
    weights, objective = _begin(arguments)
    train(weights, plan, objective, folder, resumes=arguments.resume)


def _begin(arguments: argparse.Namespace) -> tuple[Weights, Objective]:
    """The weights that a run trains, and what it minimises."""
    weights = init_seeing(TEXT_SHAPE, TowerShape(), jax.random.key(SEED))
    parts = {name: weights[name] for name in SEEING_PARTS}
    text = {"text": weights["text"]}
    if arguments.run == "tower":
        return parts, tower_objective()
    parts = jax.tree.map(jnp.asarray, load_saved(arguments.tower, parts))
    if arguments.text is not None:
        text = jax.tree.map(jnp.asarray, load_saved(arguments.text, text))
    return text, seeing_objective(parts)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=("tower", "text"))
    add_plan_arguments(parser)
    parser.add_argument("--folder", type=Path, help="of the run")
    parser.add_argument(
        "--tower",
        type=Path,
        default=VISION_RUN_FOLDER / "tower",
        help="folder of the run whose tower is taken",
    )
    parser.add_argument("--text", type=Path, help="folder of the run whose text model is taken")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder or VISION_RUN_FOLDER / arguments.run
    return arguments


if __name__ == "__main__":
    main()
