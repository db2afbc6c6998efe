"""Trains the bundled model that sees.

Owns its seed, its objectives and what its batches are; steps, checkpoints and record are those of
`training.train`.  A first run (`--tower`) learns what is at the middle of each image token's cell,
without the text model, whose steps take four times as long; the second one learns answers, from
the first one's weights if `--start` names its folder.

Run as `python -m training.vision.train` from the root of the repository; `--resume` continues from
the last checkpoint of the run.
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
    SHARE_OF_CELLS,
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


def seeing_objective() -> Objective:
    """Predicts the answers, and what is at the middle of each image token's cell."""

    def losses(weights: Weights, batch: Batch) -> Figures:
        return losses_of(weights, batch, TEXT_SHAPE, TowerShape())

    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        assert not frozen, "all weights are trained"
        found = losses(weights, batch)
        return found["text"] + SHARE_OF_CELLS * found["cells"]

    def figures(weights: Weights, _: Weights, batch: Batch) -> Figures:
        found = losses(weights, batch)
        return {
            "held_out_loss": found["text"],
            "held_out_cells": found["cells"],
            "held_out_matches": found["matches"],
        }

    return Objective(loss=loss, figures=figures, feed=seeing_feed)


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
    weights = init_seeing(TEXT_SHAPE, TowerShape(), jax.random.key(SEED))
    parts = {name: weights[name] for name in SEEING_PARTS}
    if arguments.tower:
        train(parts, plan, tower_objective(), folder, resumes=arguments.resume)
        return
    if arguments.start is not None:
        weights |= jax.tree.map(jnp.asarray, load_saved(arguments.start, parts))
    train(weights, plan, seeing_objective(), folder, resumes=arguments.resume)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("--folder", type=Path, default=VISION_RUN_FOLDER)
    parser.add_argument("--tower", action="store_true", help="train the tower alone")
    parser.add_argument("--start", type=Path, help="folder of the tower's run to start from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
