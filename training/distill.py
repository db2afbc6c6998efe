"""Trains what drafts for the bundled model: its MTP layer, or a small draft model.

Both learn the target's own distribution of each learned token, with a share of the text itself,
because a draft is accepted if it is the token that the target draws with the same noise.  The
target's weights are frozen, and rounded to bfloat16 as they are exported.

Run as `python -m training.distill mtp|draft --folder RUN` from the root of the repository, with
the target's exported folder (`--target`) or run (`--target-run`); `--resume` continues from the
last checkpoint of the run.

Shapes: B rows, T tokens of a row, N learned tokens of a batch, V vocabulary.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from training.batches import TOKENS_OF_A_STEP
from training.exported import load_exported
from training.model import (
    DRAFT_SHAPE,
    ModelShape,
    Weights,
    hidden_states,
    init_weights,
    logits_of,
)
from training.mtp import has_tokens_before, init_mtp, mtp_states
from training.tokenizer import BUNDLED
from training.train import (
    SEED,
    Batch,
    Figures,
    Objective,
    Plan,
    add_plan_arguments,
    load_weights,
    make_plan,
    train,
    write_json,
)

DEPTHS = 2
"""Drafts of the MTP layer behind each other in training."""

TEXT_SHARE = 0.1
"""Of the text in the loss; the rest is the target's distribution."""

MOST_LEARNED = TOKENS_OF_A_STEP // 2
"""Learned tokens of a batch that count; of most batches a third of the tokens is learned."""

Drafter = Literal["mtp", "draft"]

DEFAULTS: dict[Drafter, dict[str, Any]] = {
    "mtp": {"num_steps": 1000, "learning_rate": 2e-3, "long_from": 100},
    "draft": {"num_steps": 3000, "copy_steps": 400, "long_from": 600},
}


class Learned(NamedTuple):
    """The places before learned tokens, of all rows behind each other, and these tokens."""

    places: jax.Array  # [N]
    following: jax.Array  # [N]
    counts: jax.Array  # [N], 0 where there are fewer

    @classmethod
    def of(cls, batch: Batch) -> "Learned":
        learned = jnp.roll(batch["weights"], -1, axis=1).at[:, -1].set(0.0).reshape(-1)
        (places,) = jnp.nonzero(learned, size=MOST_LEARNED, fill_value=0)
        following = jnp.roll(batch["token_ids"], -1, axis=1).reshape(-1)[places]
        return cls(places, following, jnp.arange(MOST_LEARNED) < jnp.sum(learned))

    def take(self, values: jax.Array) -> jax.Array:
        """`[N, ..]` of `[B, T, ..]`."""
        return values.reshape(-1, *values.shape[2:])[self.places]

    def mean(self, values: jax.Array, counts: jax.Array) -> jax.Array:
        """Of `values` `[N]` in the places that also `counts` `[B, T]` has."""
        counts = self.counts * self.take(counts)
        return jnp.sum(values * counts) / jnp.sum(counts)


def mtp_objective(target: Weights, shape: ModelShape) -> Objective:
    """An MTP layer that predicts as the target does, from its states; `DEPTHS` times in a row."""

    def predict(weights: Weights, target: Weights, batch: Batch) -> Predictions:
        embed, token_ids, segments = target["embed"], batch["token_ids"], batch["segments"]
        learned = Learned.of(batch)
        hidden = hidden_states(target, token_ids, segments, shape=shape)
        states = mtp_states(weights, embed[token_ids], hidden, segments, shape=shape)
        return Predictions(
            learned,
            aim=logits_of(embed, learned.take(hidden)),
            of_depths=[logits_of(embed, learned.take(each)) for each in islice(states, DEPTHS)],
            counts=[has_tokens_before(segments, depth + 1) for depth in range(DEPTHS)],
        )

    return _objective(predict, target)


def draft_objective(target: Weights, shape: ModelShape, draft_shape: ModelShape) -> Objective:
    """A model of its own that predicts as the target does."""

    def predict(weights: Weights, target: Weights, batch: Batch) -> Predictions:
        learned = Learned.of(batch)

        def logits(model: Weights, shape: ModelShape) -> jax.Array:
            hidden = hidden_states(model, batch["token_ids"], batch["segments"], shape=shape)
            return logits_of(model["embed"], learned.take(hidden))

        return Predictions(
            learned,
            aim=logits(target, shape),
            of_depths=[logits(weights, draft_shape)],
            counts=[jnp.ones_like(batch["segments"])],
        )

    return _objective(predict, target)


class Predictions(NamedTuple):
    """The target's logits `[N, V]` of learned tokens, and those of each depth of a drafter."""

    learned: Learned
    aim: jax.Array
    of_depths: list[jax.Array]
    counts: list[jax.Array]  # of each depth [B, T], the places where it has an input

    def means(self, measure: Callable[[jax.Array, "Predictions"], jax.Array]) -> list[jax.Array]:
        """The mean of a measure `[N]` of logits for each depth."""
        return [
            self.learned.mean(measure(logits, self), counts)
            for logits, counts in zip(self.of_depths, self.counts, strict=True)
        ]


def _objective(
    predict: Callable[[Weights, Weights, Batch], Predictions], target: Weights
) -> Objective:
    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        means = predict(weights, frozen, batch).means(cross_entropy)
        return jnp.mean(jnp.stack(means))

    def figures(weights: Weights, frozen: Weights, batch: Batch) -> Figures:
        means = predict(weights, frozen, batch).means(agreement)
        found = {f"agreement_{depth}": mean for depth, mean in enumerate(means, start=1)}
        return {"held_out_loss": loss(weights, frozen, batch), **found}

    return Objective(loss=loss, figures=figures, frozen=target)


def cross_entropy(logits: jax.Array, predictions: Predictions) -> jax.Array:
    """In nats, of the target's distribution and, by `TEXT_SHARE`, of the text."""
    logprobs = jax.nn.log_softmax(logits)  # [N, V]
    by_target = -jnp.sum(jax.nn.softmax(predictions.aim) * logprobs, axis=-1)
    following = predictions.learned.following[:, None]
    by_text = -jnp.take_along_axis(logprobs, following, axis=-1)[:, 0]
    return (1 - TEXT_SHARE) * by_target + TEXT_SHARE * by_text


def agreement(logits: jax.Array, predictions: Predictions) -> jax.Array:
    """1 where both find the same token the likeliest, else 0."""
    is_equal = jnp.argmax(logits, axis=-1) == jnp.argmax(predictions.aim, axis=-1)
    return is_equal.astype(jnp.float32)


def load_target(folder: Path | None, run: Path | None) -> Weights:
    """The target of an exported folder or a run, in float32 with the values that are exported."""
    shape = ModelShape()
    weights = load_exported(folder or BUNDLED, shape) if run is None else load_weights(run, shape)
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32), weights
    )


def digest_of(target: Weights) -> str:
    """A SHA-256 of the target's weights, in hex."""
    state = hashlib.sha256()
    for leaf in jax.tree.leaves(target):
        state.update(np.asarray(leaf, np.float32).tobytes())
    return state.hexdigest()


def check_target(folder: Path, target: Weights) -> None:
    """Raises ValueError if the run in `folder` was not trained for these weights."""
    saved = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    if saved["target"] != digest_of(target):
        raise ValueError(
            f"the run {str(folder)!r} was trained for other weights than those of the given "
            f"target; name the target that it was trained for, or train it anew"
        )


def main() -> None:
    arguments = _parse_arguments()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    target = load_target(arguments.target, arguments.target_run)
    if arguments.resume:
        check_target(folder, target)
    plan = make_plan(arguments, **DEFAULTS[arguments.drafter])
    run_drafter(arguments.drafter, target, plan, folder, resumes=arguments.resume)


def run_drafter(
    drafter: Drafter, target: Weights, plan: Plan, folder: Path, *, resumes: bool
) -> Weights:
    """Trains one for the bundled model's shape; returns its weights."""
    shape, key = ModelShape(), jax.random.key(SEED)
    if drafter == "mtp":
        weights, objective = init_mtp(target, key), mtp_objective(target, shape)
    else:
        weights = init_weights(DRAFT_SHAPE, key)
        objective = draft_objective(target, shape, DRAFT_SHAPE)
    write_json(
        folder / "plan.json",
        {"drafter": drafter, "target": digest_of(target), "plan": asdict(plan)},
    )
    return train(weights, plan, objective, folder, resumes=resumes).weights


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", choices=DEFAULTS)
    add_plan_arguments(parser)
    parser.add_argument("--folder", type=Path, required=True, help="of the run")
    parser.add_argument("--target", type=Path, help="exported folder (default: the bundled model)")
    parser.add_argument("--target-run", type=Path, help="folder of the target's run instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
