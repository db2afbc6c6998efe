"""A gated delta net: the native operation against its definition, on the same ragged steps."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import ReferenceOps
from cadenza.backends.xla.ops.table import (
    DecoderSpec,
    DeltaInputs,
    DeltaLayer,
    DeltaWeights,
    OpTable,
    StatePool,
    StepArrays,
    StepStates,
)
from cadenza.checkpoint.layer_kind import DeltaShape
from cadenza.core.step_schema import ModelInputs
from tests.xla.harness import HOSTILE

pytestmark = pytest.mark.native

NUM_TOKENS, NUM_ROWS, NUM_SLOTS, NUM_LAYERS = 24, 4, 6, 2
SHAPE = DeltaShape(num_key_heads=2, num_value_heads=6, key_size=32, value_size=48, num_inputs=4)
LAYER = DeltaLayer(index=1, shape=SHAPE, norm_eps=1e-6)
TILED = replace(LAYER, shape=replace(SHAPE, is_tiled=True))


@dataclass(frozen=True, slots=True)
class Part:
    """`count` tokens of a row; `kept` are the slots of its last tokens."""

    count: int
    initial: int
    kept: tuple[int, ...] = ()


PROMPTS = (Part(9, -1, (0,)), Part(1, -1, (1,)), Part(0, -1), Part(6, -1, (2, 3)))
GOING_ON = (Part(1, 0, (4,)), Part(3, 1, (1, 5, 0)), Part(2, 3, (3,)), Part(0, -1))


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def make_weights() -> DeltaWeights:
    return DeltaWeights(
        conv=random(1, SHAPE.num_inputs, SHAPE.num_channels, scale=0.5),
        decay=-np.exp(random(2, SHAPE.num_value_heads) - 2),
        decay_bias=random(3, SHAPE.num_value_heads),
        norm=random(4, SHAPE.value_size),
    )


def step_of(parts: tuple[Part, ...]) -> tuple[StepArrays, StepStates]:
    starts = np.cumsum([0, *(part.count for part in parts)]).astype(np.int32)
    kept = np.full(NUM_TOKENS, -1, np.int32)
    for part, end in zip(parts, starts[1:], strict=True):
        kept[end - len(part.kept) : end] = part.kept
    groups = ModelInputs.empty(bucket=NUM_TOKENS, num_rows=NUM_ROWS).groups
    groups.rows.query_starts[:] = starts
    rows = np.repeat(np.arange(NUM_ROWS), [part.count for part in parts])
    arrays = StepArrays(
        num_tokens=jnp.int32(starts[-1]),
        num_logits=jnp.int32(0),
        tokens=groups.tokens,
        token_rows=jnp.asarray(np.pad(rows, (0, NUM_TOKENS - len(rows))), jnp.int32),
        rows=jax.tree.map(jnp.asarray, groups.rows),
        logits=groups.logits,
        page_table=jnp.zeros((NUM_ROWS, 1), jnp.int32),
    )
    initial = jnp.asarray([part.initial for part in parts], jnp.int32)
    return arrays, StepStates(initial, jnp.asarray(kept))


class Table:
    """An op table and its pool."""

    def __init__(self, table: OpTable, layer: DeltaLayer = LAYER) -> None:
        self.run = jax.jit(
            lambda pool, given, step: table.compute(
                lambda ops: ops.gated_delta(given, make_weights(), pool, step, layer)
            ),
            donate_argnums=0,
        )
        self.pool = jax.jit(lambda: table.new_state_pool(NUM_SLOTS, NUM_LAYERS, SHAPE))()

    def step(self, parts: tuple[Part, ...], given: DeltaInputs) -> np.ndarray:
        out, self.pool = self.run(self.pool, given, step_of(parts))
        return np.asarray(out.astype(jnp.float32))[: sum(part.count for part in parts)]

    def states(self, slots: list[int]) -> StatePool:
        """Of slots: inputs [S, J - 1, M] and states [S, Hv, Dk, Dv], in the reference's layout."""
        inputs, states = (np.asarray(side)[slots, LAYER.index] for side in self.pool)
        if states.ndim == 5:
            states = np.moveaxis(states, 3, 2).reshape(*states.shape[:2], SHAPE.key_size, -1)
        if inputs.dtype == np.uint16:
            inputs = inputs.view(jnp.bfloat16)
        return StatePool(inputs.astype(np.float32), states)


def given_for(seed: int, dtype: Any) -> DeltaInputs:
    return DeltaInputs(
        mixed=jnp.asarray(random(seed, NUM_TOKENS, SHAPE.num_channels), dtype),
        gate=jnp.asarray(random(seed + 1, NUM_TOKENS, SHAPE.value_width), dtype),
        rates=jnp.asarray(random(seed + 2, NUM_TOKENS, 2 * SHAPE.num_value_heads)),
    )


@pytest.mark.parametrize(("dtype", "layer"), [(np.float32, LAYER), (jnp.bfloat16, TILED)])
def test_native_gated_delta_nets_compute_the_definition(dtype: Any, layer: DeltaLayer):
    spec = DecoderSpec(model=HOSTILE, dtype=dtype, page_size=16)
    native, reference = Table(NativeOps(spec), layer), Table(ReferenceOps(spec), layer)
    tolerance = 2e-5 if dtype == np.float32 else 2.0**-6
    for seed, parts in ((10, PROMPTS), (20, GOING_ON)):
        given = given_for(seed, dtype)
        ours, expected = native.step(parts, given), reference.step(parts, given)
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)
        kept = sorted({slot for part in parts for slot in part.kept})
        for own, defined in zip(native.states(kept), reference.states(kept), strict=True):
            np.testing.assert_allclose(own, defined, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("table", [NativeOps, ReferenceOps])
def test_a_rows_outputs_depend_neither_on_its_cut_nor_on_its_neighbours(table: type[OpTable]):
    spec = DecoderSpec(model=HOSTILE, dtype=np.float32, page_size=16)
    given = given_for(30, np.float32)
    whole = Table(table(spec))
    expected = whole.step((Part(9, -1, (0,)), *(Part(0, -1),) * 3), given)
    cut = Table(table(spec))

    def tokens(*places: int) -> DeltaInputs:
        rows = np.pad(np.array(places), (0, NUM_TOKENS - len(places)))
        return DeltaInputs(*(each[rows] for each in given))

    none = Part(0, -1)
    first = cut.step((Part(2, -1, (3,)), Part(4, -1, (1,)), none, none), tokens(15, 16, 0, 1, 2, 3))
    rest = cut.step((none, Part(1, 3, (3,)), Part(5, 1, (0,)), none), tokens(17, 4, 5, 6, 7, 8))
    np.testing.assert_array_equal(np.concatenate([first[2:], rest[1:]]), expected)
    np.testing.assert_array_equal(cut.states([0]).states, whole.states([0]).states)
