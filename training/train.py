"""Trains the bundled model.

Owns the run, of this model and of what drafts for it: loss, optimiser, schedule,
checkpoints of the run and the record of its losses.  A step's batch depends only on the
step, so a run that is interrupted and resumed ends with the same weights as an
uninterrupted one.

Run as `python -m training.train` from the root of the repository; `--resume` continues
from the last checkpoint of the run.

Shapes: B rows, T tokens of a row.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from training.batches import MEDIUM, SHORT, PackedBatch, make_batch, training_batch
from training.corpus.example import Split
from training.exported import load_exported
from training.model import ModelShape, Weights, count_parameters, forward, init_weights
from training.tokenizer import load_tokenizer

SEED = 20
DEFAULT_STEPS = 3000
HELD_OUT_BATCHES = 4
"""In rows of each length."""

RUN_FOLDER = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The schedule of a run, in steps."""

    num_steps: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.5
    copy_steps: int = 0
    long_from: int = 500
    evaluate_every: int = 50
    save_every: int = 25

    def schedule(self) -> optax.Schedule:
        """Linear warm-up, a plateau, and a linear decay to zero."""
        decay_steps = int(self.num_steps * self.decay_share)
        rate = self.learning_rate
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, rate, self.warmup_steps),
                optax.constant_schedule(rate),
                optax.linear_schedule(rate, 0.0, decay_steps),
            ],
            [self.warmup_steps, self.num_steps - decay_steps],
        )


Batch = dict[str, jax.Array]
Figures = dict[str, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a run reads.

    Args:
        training: the batch of a step.
        held_out: the batches whose figures are averaged, the same each time.
    """

    training: Callable[[int], Batch]
    held_out: Sequence[Batch]


def text_feed(plan: Plan) -> Feed:
    """Packed text; the held-out batches are in short and in medium rows."""
    tokenizer = load_tokenizer()

    def training(step: int) -> Batch:
        batch = training_batch(
            tokenizer, (SEED, step), step, copy_steps=plan.copy_steps, long_from=plan.long_from
        )
        return as_arrays(batch)

    held_out = [
        as_arrays(make_batch(tokenizer, Split.HELD_OUT, i, length))
        for length in (SHORT, MEDIUM)
        for i in range(HELD_OUT_BATCHES)
    ]
    return Feed(training=training, held_out=held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a run minimises.

    Args:
        loss: of the trained weights, the frozen ones and a batch; a mean in nats.
        figures: scalars about a held-out batch, by name; arguments as of `loss`.
        frozen: weights that are read and not trained.
        feed: the batches.
    """

    loss: Callable[[Weights, Weights, Batch], jax.Array]
    figures: Callable[[Weights, Weights, Batch], Figures]
    frozen: Weights = field(default_factory=dict[str, Any])
    feed: Callable[[Plan], Feed] = text_feed


@dataclass(slots=True, eq=False)
class Run:
    """The state from which an interrupted run resumes."""

    step: int
    weights: Weights
    optimizer_state: Any
    record: list[dict[str, float]]
    seconds: float = 0.0

    def save(self, folder: Path) -> None:
        """Writes the record before the weights, so that it covers their step at any time."""
        write_json(folder / "progress.json", {"seconds": self.seconds, "record": self.record})
        leaves = jax.tree.leaves((self.weights, self.optimizer_state))
        arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
        temporary = folder / "run.tmp.npz"
        np.savez(temporary, step=np.asarray(self.step), **arrays)
        os.replace(temporary, folder / "run.npz")

    def load(self, folder: Path) -> None:
        tree = (self.weights, self.optimizer_state)
        num_leaves = len(jax.tree.leaves(tree))
        with np.load(folder / "run.npz") as saved:
            self.step = int(saved["step"])
            leaves = [jnp.asarray(saved[str(i)]) for i in range(num_leaves)]
        self.weights, self.optimizer_state = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        self.seconds = progress["seconds"]
        self.record = [entry for entry in progress["record"] if entry["step"] <= self.step]


def load_weights(folder: Path, shape: ModelShape) -> Weights:
    """The weights of a model of this shape in a run's last checkpoint."""
    return load_saved(folder, init_weights(shape, jax.random.key(SEED)))


def load_saved(folder: Path, weights: Weights) -> Weights:
    """The weights of a run's last checkpoint, of the same structure; they are its first leaves."""
    leaves, structure = jax.tree.flatten(weights)
    with np.load(folder / "run.npz") as saved:
        return jax.tree.unflatten(structure, [saved[str(i)] for i in range(len(leaves))])


def main() -> None:
    arguments = _parse_arguments()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    shape, plan = ModelShape(), make_plan(arguments)
    write_json(folder / "plan.json", {"shape": asdict(shape), "plan": asdict(plan)})
    if arguments.start is None:
        weights = init_weights(shape, jax.random.key(SEED))
    else:
        weights = load_exported(arguments.start, shape)
    train(weights, plan, text_objective(shape), folder, resumes=arguments.resume)


def train(
    weights: Weights, plan: Plan, objective: Objective, folder: Path, *, resumes: bool
) -> Run:
    """Runs the steps of a plan, from the last checkpoint of the run if it `resumes`.

    The next batch is made while the device computes.
    """
    optimizer = make_optimizer(plan)
    run = Run(0, weights, optimizer.init(weights), [])
    if resumes:
        run.load(folder)
    print(f"{count_parameters(run.weights):,} parameters, from step {run.step}", flush=True)
    feed = objective.feed(plan)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def take_step(weights: Weights, state: Any, frozen: Weights, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(objective.loss)(weights, frozen, batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    figures = jax.jit(objective.figures)
    losses: list[jax.Array] = []
    started = time.monotonic() - run.seconds
    batch = feed.training(run.step)
    while run.step < plan.num_steps:
        run.weights, run.optimizer_state, loss = take_step(
            run.weights, run.optimizer_state, objective.frozen, batch
        )
        losses.append(loss)
        run.step += 1
        batch = feed.training(run.step)
        jax.block_until_ready(loss)
        run.seconds = time.monotonic() - started
        if run.step % plan.evaluate_every == 0 or run.step == plan.num_steps:
            found = [figures(run.weights, objective.frozen, batch) for batch in feed.held_out]
            _record(run, losses, mean_figures(found))
            losses = []
        if run.step % plan.save_every == 0 or run.step == plan.num_steps:
            run.save(folder)
    return run


def make_optimizer(plan: Plan) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""

    def dimensions(weights: Weights) -> Weights:
        return {
            name: dimensions(value) if isinstance(value, dict) else _muon_dimensions(name, value)
            for name, value in weights.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            plan.schedule(),
            weight_decay=plan.weight_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def _muon_dimensions(name: str, weight: jax.Array) -> MuonDimensionNumbers | None:
    """Of a matrix [.., K, N] of a layer; None for other weights."""
    if not name.endswith("_proj"):
        return None
    return MuonDimensionNumbers(reduction_axis=weight.ndim - 2, output_axis=weight.ndim - 1)


def text_objective(shape: ModelShape) -> Objective:
    """Predicts the learned tokens of the text."""

    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        assert not frozen, "all weights are trained"
        return batch_loss(weights, batch, shape)

    return Objective(loss=loss, figures=lambda *given: {"held_out_loss": loss(*given)})


def batch_loss(weights: Weights, batch: Batch, shape: ModelShape) -> jax.Array:
    """Mean cross entropy of the learned tokens, in nats."""
    logits = forward(weights, batch["token_ids"], batch["segments"], shape=shape)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], batch["token_ids"][:, 1:]
    )  # [B, T - 1]
    learned = batch["weights"][:, 1:]
    return jnp.sum(losses * learned) / jnp.sum(learned)


def mean_figures(found: Sequence[Figures]) -> dict[str, float]:
    return {name: round(float(np.mean([each[name] for each in found])), 4) for name in found[0]}


def as_arrays(batch: PackedBatch) -> Batch:
    return {
        "token_ids": jnp.asarray(batch.token_ids),
        "segments": jnp.asarray(batch.segments),
        "weights": jnp.asarray(batch.weights),
    }


def write_json(path: Path, value: Any) -> None:
    """Writes the file atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _record(run: Run, losses: list[jax.Array], held_out: dict[str, float]) -> None:
    entry = {
        "step": run.step,
        "seconds": round(run.seconds),
        "train_loss": round(float(np.mean([float(loss) for loss in losses])), 4),
        **held_out,
    }
    run.record.append(entry)
    print(json.dumps(entry), flush=True)


def make_plan(arguments: argparse.Namespace, **defaults: Any) -> Plan:
    """The plan of the arguments; a resumed run keeps the values that they do not give.

    Of another run, the values that are not given are `defaults`.
    """
    names = ("num_steps", "learning_rate", "copy_steps", "long_from")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    saved = {"num_steps": DEFAULT_STEPS, **defaults}
    if arguments.resume:
        text = (arguments.folder / "plan.json").read_text(encoding="utf-8")
        saved = json.loads(text)["plan"]
    return Plan(**saved | given)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("--folder", type=Path, default=RUN_FOLDER)
    parser.add_argument("--start", type=Path, help="folder of exported weights to start from")
    return parser.parse_args()


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, dest="num_steps")
    parser.add_argument("--rate", type=float, dest="learning_rate", help="peak learning rate")
    parser.add_argument("--copy-steps", type=int, help="steps of the copying phase")
    parser.add_argument("--long-from", type=int, help="first step with rows of 2,048 tokens")
    parser.add_argument("--resume", action="store_true")


if __name__ == "__main__":
    main()
