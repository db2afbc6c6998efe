"""Training what drafts: only the drafter learns, from what the engine will give it.

The models are tiny and have random weights. Training is no part of the package, and compiles for
minutes: `make soak` runs these.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.distill import (
    DEPTHS,
    MOST_LEARNED,
    Learned,
    Predictions,
    agreement,
    check_target,
    cross_entropy,
    digest_of,
    draft_objective,
    mtp_objective,
    run_drafter,
)
from training.model import ModelShape, Weights, init_weights
from training.mtp import has_tokens_before, init_mtp, mtp_states
from training.train import Batch, Figures, Objective, Plan, load_saved, train

SHAPE = ModelShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
SMALLER = ModelShape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
)
BUNDLED_WORDS = replace(SHAPE, vocab_size=ModelShape().vocab_size)
PLAN = Plan(num_steps=2, warmup_steps=1, evaluate_every=2, save_every=1)
TOLERANCE = 1e-5

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", autouse=True)
def quick_compilations() -> Iterator[None]:
    """The models are too small for XLA's optimisations to pay. No program outlives the module."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(scope="module")
def target() -> Weights:
    return make_target(SHAPE)


@functools.partial(jax.jit, static_argnums=0)
def make_weights(shape: ModelShape, seed: int) -> Weights:
    return init_weights(shape, jax.random.key(seed))


def make_target(shape: ModelShape) -> Weights:
    weights = make_weights(shape, 1)
    return weights | {"embed": 25 * weights["embed"]}  # so that some tokens are likely


def start(drafter: str, target: Weights) -> tuple[Weights, Objective]:
    if drafter == "mtp":
        return init_mtp(target, jax.random.key(2)), mtp_objective(target, SHAPE)
    return make_weights(SMALLER, 2), draft_objective(target, SHAPE, SMALLER)


def small_batch() -> Batch:
    token_ids = np.random.default_rng(6).integers(0, SHAPE.vocab_size, (2, 128), np.int32)
    ones = np.ones(token_ids.shape, np.float32)
    batch = {"token_ids": token_ids, "segments": ones.astype(np.int32), "weights": ones}
    return {name: jnp.asarray(values) for name, values in batch.items()}


@pytest.mark.parametrize("drafter", ["mtp", "draft"])
def test_a_drafter_learns_what_its_target_gives(drafter: str, target: Weights) -> None:
    weights, objective = start(drafter, target)
    optimizer, batch = optax.adam(0.02), small_batch()

    @jax.jit
    def take_step(weights: Weights, state: Any) -> Any:
        loss, grads = jax.value_and_grad(objective.loss)(weights, objective.frozen, batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    first, state, losses = weights, optimizer.init(weights), list[float]()
    for _ in range(12):
        weights, state, loss = take_step(weights, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
    check_that_all_changed(first, weights)


@pytest.mark.parametrize(("drafter", "num_depths"), [("mtp", DEPTHS), ("draft", 1)])
def test_a_drafters_figures_are_its_loss_and_its_agreement_at_each_depth(
    drafter: str, num_depths: int, target: Weights
) -> None:
    weights, objective = start(drafter, target)
    figures = jax.eval_shape(objective.figures, weights, target, small_batch())
    agreements = {f"agreement_{depth}" for depth in range(1, num_depths + 1)}
    assert figures.keys() == agreements | {"held_out_loss"}


def check_that_all_changed(first: Weights, last: Weights) -> None:
    new = dict(jax.tree.leaves_with_path(last))
    for name, old in jax.tree.leaves_with_path(first):
        assert not np.array_equal(old, new[name]), name


class Interrupted(Exception):
    pass


def interrupted(*_: object) -> Figures:
    raise Interrupted


def real_objective(target: Weights) -> Objective:
    return mtp_objective(target, BUNDLED_WORDS)


def plain_objective(target: Weights) -> Objective:
    """Nearer to a value of the batch and the target: all that a run reads, computed quickly."""

    def loss(weights: Weights, frozen: Weights, batch: Batch) -> jax.Array:
        aim = jnp.mean(frozen["embed"][batch["token_ids"], 0] * batch["weights"])
        losses = [jnp.mean((leaf - aim) ** 2) for leaf in jax.tree.leaves(weights)]
        return jnp.mean(jnp.stack(losses))

    return Objective(
        loss=loss, figures=lambda *given: {"held_out_loss": loss(*given)}, frozen=target
    )


@pytest.mark.parametrize("make_objective", [plain_objective, real_objective])
def test_a_resumed_run_ends_alike_and_leaves_the_target(
    make_objective: Callable[[Weights], Objective], tmp_path: Path
) -> None:
    target = make_target(BUNDLED_WORDS)
    before, folders = digest_of(target), [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    weights, objective = init_mtp(target, jax.random.key(2)), make_objective(target)
    stopping = Objective(loss=objective.loss, figures=interrupted, frozen=objective.frozen)
    with pytest.raises(Interrupted):  # after the second step, of which there is no checkpoint
        train(jax.tree.map(jnp.copy, weights), PLAN, stopping, folders[1], resumes=False)
    whole, again = (
        train(jax.tree.map(jnp.copy, weights), PLAN, objective, folder, resumes=resumes)
        for folder, resumes in zip(folders, (False, True), strict=True)
    )
    assert digest_of(target) == before
    for one, other in zip(
        jax.tree.leaves(whole.weights), jax.tree.leaves(again.weights), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    check_that_all_changed(weights, whole.weights)
    figures = jax.eval_shape(objective.figures, weights, target, small_batch()).keys()
    assert figures < set(again.record[-1])


def random_inputs(length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Embeddings, hidden states and one segment."""
    keys = jax.random.split(jax.random.key(3), 2)
    embedded, hidden = (jax.random.normal(key, (1, length, SHAPE.hidden_size)) for key in keys)
    return embedded, hidden, jnp.ones((1, length), jnp.int32)


@functools.partial(jax.jit, static_argnames="count")
def first_states(weights: Weights, inputs: tuple[jax.Array, ...], count: int) -> list[jax.Array]:
    return [each[0] for each in islice(mtp_states(weights, *inputs, shape=SHAPE), count)]


def states_of(weights: Weights, inputs: tuple[jax.Array, ...], count: int) -> list[np.ndarray]:
    """The outputs [T, E] of the first row, by depth."""
    return [np.asarray(each) for each in first_states(weights, inputs, count)]


def test_each_depth_computes_what_drafts_behind_each_other_do(target: Weights) -> None:
    """The engine's way: a draft's hidden state is the layer's output before it, and all of the
    earlier tokens keep what the target gave."""
    weights = init_mtp(target, jax.random.key(2))
    embedded, hidden, segments = random_inputs(200)
    by_depth = states_of(weights, (embedded, hidden, segments), 3)
    for place in (3, 9, 128, 130, 199):
        own = hidden
        for depth in range(1, 4):
            (states,) = states_of(weights, (embedded, own, segments), 1)
            behind = place - 3 + depth
            np.testing.assert_allclose(by_depth[depth - 1][behind], states[behind], atol=TOLERANCE)
            own = own.at[0, behind].set(states[behind])
    plain = states_of(weights, (embedded, jnp.asarray(by_depth[0])[None], segments), 1)[0]
    assert np.abs(by_depth[1] - plain).max() > 100 * TOLERANCE


def test_segments_of_a_row_do_not_reach_each_other(target: Weights) -> None:
    weights = init_mtp(target, jax.random.key(2))
    embedded, hidden, segments = random_inputs(90)
    together = states_of(weights, (embedded, hidden, segments.at[0, 40:].set(2)), 2)
    alone = states_of(weights, (embedded[:, 40:], hidden[:, 40:], segments[:, 40:]), 2)
    for depth, (row, own) in enumerate(zip(together, alone, strict=True), start=1):
        np.testing.assert_allclose(row[40 + depth :], own[depth:], atol=0.01)
        assert np.abs(row[40] - own[0]).max() > 0.1, "the first has no input of its segment"


def test_places_with_enough_tokens_before_them_are_found() -> None:
    found = has_tokens_before(jnp.array([[1, 1, 1, 2, 2, 0]]), 2)
    assert found.tolist() == [[False, False, True, False, False, False]]


def test_learned_tokens_are_weighed_alone() -> None:
    batch: Batch = {
        "token_ids": jnp.array([[5, 6, 7], [8, 9, 4]]),
        "segments": jnp.ones((2, 3), jnp.int32),
        "weights": jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]),
    }
    learned = jax.jit(Learned.of)(batch)
    assert len(learned.places) == MOST_LEARNED
    assert learned.places[:3].tolist() == [1, 3, 4]
    assert learned.following[:3].tolist() == [7, 9, 4]
    values = jnp.arange(MOST_LEARNED, dtype=jnp.float32)
    counts = jnp.array([[0, 1, 0], [0, 1, 0]])
    assert learned.mean(values, counts) == 1.0  # of the values 0 and 2


def test_the_loss_is_least_for_the_targets_own_distribution() -> None:
    aim = jax.random.normal(jax.random.key(4), (MOST_LEARNED, 8))
    following = jnp.argmax(aim, axis=-1)
    ones = jnp.ones(MOST_LEARNED, jnp.int32)
    predictions = Predictions(Learned(ones, following, ones), aim, [aim, -aim], [])
    own, other = (cross_entropy(logits, predictions).mean() for logits in predictions.of_depths)
    assert own < other
    assert agreement(aim, predictions).mean() == 1.0
    assert agreement(-aim, predictions).mean() == 0.0


def test_a_run_belongs_to_its_target(target: Weights, tmp_path: Path) -> None:
    bundled = make_weights(ModelShape(), 5)
    plan = Plan(num_steps=0)
    weights = run_drafter("mtp", bundled, plan, tmp_path, resumes=False)
    check_target(tmp_path, bundled)
    with pytest.raises(ValueError, match="was trained for other weights"):
        check_target(tmp_path, target)
    assert weights["input_proj"].shape == (512, 256)
    assert not (tmp_path / "run.npz").exists()
    with pytest.raises(FileNotFoundError):
        load_saved(tmp_path, weights)
