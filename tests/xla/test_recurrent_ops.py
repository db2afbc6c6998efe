"""Layers with a state: native operations against their definitions, on the same ragged steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    ConvWeights,
    DecoderSpec,
    DeltaInputs,
    DeltaWeights,
    RecurrentLayer,
    ScanInputs,
    ScanWeights,
    StatePool,
    StepArrays,
    StepStates,
)
from cadenza.batch.step_schema import ModelInputs
from cadenza.models.layer_kind import ConvShape, DeltaShape, Recurrence, ScanShape
from tests.xla.harness import HOSTILE

pytestmark = pytest.mark.native

NUM_TOKENS, NUM_ROWS, NUM_SLOTS, NUM_LAYERS = 24, 4, 6, 2


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


@dataclass(frozen=True, slots=True)
class Case:
    operation: str
    shape: Recurrence
    weights: Any
    given: Callable[[int, Any], Any]

    @property
    def layer(self) -> RecurrentLayer[Any]:
        return RecurrentLayer(index=1, shape=self.shape, norm_eps=1e-6)


def delta_case(is_tiled: bool) -> Case:
    shape = DeltaShape(
        num_key_heads=2,
        num_value_heads=6,
        key_size=32,
        value_size=48,
        num_inputs=4,
        is_tiled=is_tiled,
    )
    weights = DeltaWeights(
        conv=random(1, shape.num_inputs, shape.num_channels, scale=0.5),
        decay=-np.exp(random(2, shape.num_value_heads) - 2),
        decay_bias=random(3, shape.num_value_heads),
        norm=random(4, shape.value_size),
    )

    def given(seed: int, dtype: Any) -> DeltaInputs:
        return DeltaInputs(
            mixed=jnp.asarray(random(seed, NUM_TOKENS, shape.num_channels), dtype),
            gate=jnp.asarray(random(seed + 1, NUM_TOKENS, shape.value_width), dtype),
            rates=jnp.asarray(random(seed + 2, NUM_TOKENS, 2 * shape.num_value_heads)),
        )

    return Case("gated_delta", shape, weights, given)


def conv_case(has_bias: bool) -> Case:
    shape = ConvShape(num_channels=80, num_inputs=3, has_bias=has_bias)
    weights = ConvWeights(
        conv=random(1, shape.num_inputs, shape.num_channels, scale=0.5),
        bias=random(2, shape.num_channels) if has_bias else None,
    )

    def given(seed: int, dtype: Any) -> jax.Array:
        return jnp.asarray(random(seed, NUM_TOKENS, 3 * shape.num_channels), dtype)

    return Case("short_conv", shape, weights, given)


def scan_case() -> Case:
    shape = ScanShape(num_heads=6, num_groups=2, key_size=48, value_size=32, num_inputs=4)
    weights = ScanWeights(
        conv=random(1, shape.num_inputs, shape.num_channels, scale=0.5),
        conv_bias=random(2, shape.num_channels, scale=0.3),
        decay=-np.exp(random(3, shape.num_heads) - 2),
        rate_bias=random(4, shape.num_heads) - 2,  # rates near 0, where 1 + e^x is 1
        skip=random(5, shape.num_heads),
        norm=random(6, shape.value_width),
    )

    def given(seed: int, dtype: Any) -> ScanInputs:
        return ScanInputs(
            mixed=jnp.asarray(random(seed, NUM_TOKENS, shape.num_channels), dtype),
            gate=jnp.asarray(random(seed + 1, NUM_TOKENS, shape.value_width), dtype),
            rates=jnp.asarray(random(seed + 2, NUM_TOKENS, shape.num_heads, scale=3.0)),
        )

    return Case("selective_scan", shape, weights, given)


CASES = {
    "delta": delta_case(is_tiled=False),
    "tiled-delta": delta_case(is_tiled=True),
    "conv": conv_case(has_bias=False),
    "biased-conv": conv_case(has_bias=True),
    "scan": scan_case(),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


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
    def __init__(self, table: OpTable, case: Case) -> None:
        def run(pool: StatePool, given: Any, step: tuple[StepArrays, StepStates]) -> Any:
            def decode(ops: OpTable) -> Any:
                return getattr(ops, case.operation)(given, case.weights, pool, step, case.layer)

            return table.compute(decode)

        self.case = case
        self.run = jax.jit(run, donate_argnums=0)
        self.pool = jax.jit(lambda: table.new_state_pool(NUM_SLOTS, NUM_LAYERS, case.shape))()

    def step(self, parts: tuple[Part, ...], given: Any) -> np.ndarray:
        out, self.pool = self.run(self.pool, given, step_of(parts))
        return np.asarray(out.astype(jnp.float32))[: sum(part.count for part in parts)]

    def states(self, slots: list[int]) -> list[np.ndarray]:
        """Of slots: inputs [S, J - 1, M], and states [S, Hv, Dk, Dv] if there are any, in the
        reference's layout."""
        held = [np.asarray(side)[slots, 1] for side in jax.tree.leaves(self.pool)]
        inputs = held[0].view(jnp.bfloat16) if held[0].dtype == np.uint16 else held[0]
        matrices = self.case.shape.matrices
        if matrices is None:
            return [inputs.astype(np.float32)]
        states = held[1]
        if states.ndim == 5:
            states = np.moveaxis(states, 3, 2).reshape(*states.shape[:2], matrices.key_size, -1)
        return [inputs.astype(np.float32), states]


@each_case
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_native_layers_with_a_state_compute_the_definition(case: Case, dtype: Any):
    spec = DecoderSpec(model=HOSTILE, dtype=dtype, page_size=16)
    native, reference = Table(NativeOps(spec), case), Table(OpTable(spec), case)
    tolerance = 2e-5 if dtype == np.float32 else 2.0**-6
    for seed, parts in ((10, PROMPTS), (20, GOING_ON)):
        given = case.given(seed, dtype)
        ours, expected = native.step(parts, given), reference.step(parts, given)
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)
        kept = sorted({slot for part in parts for slot in part.kept})
        for own, defined in zip(native.states(kept), reference.states(kept), strict=True):
            np.testing.assert_allclose(own, defined, rtol=2e-5, atol=2e-5)


@each_case
@pytest.mark.parametrize("table", [NativeOps, OpTable])
def test_a_rows_outputs_depend_neither_on_its_cut_nor_on_its_neighbours(
    case: Case, table: type[OpTable]
):
    spec = DecoderSpec(model=HOSTILE, dtype=np.float32, page_size=16)
    given = case.given(30, np.float32)
    whole = Table(table(spec), case)
    expected = whole.step((Part(9, -1, (0,)), *(Part(0, -1),) * 3), given)
    cut = Table(table(spec), case)

    def tokens(*places: int) -> Any:
        rows = np.pad(np.array(places), (0, NUM_TOKENS - len(places)))
        return jax.tree.map(lambda side: side[rows], given)

    none = Part(0, -1)
    first = cut.step((Part(2, -1, (3,)), Part(4, -1, (1,)), none, none), tokens(15, 16, 0, 1, 2, 3))
    rest = cut.step((none, Part(1, 3, (3,)), Part(5, 1, (0,)), none), tokens(17, 4, 5, 6, 7, 8))
    np.testing.assert_array_equal(np.concatenate([first[2:], rest[1:]]), expected)
    for own, defined in zip(cut.states([0]), whole.states([0]), strict=True):
        np.testing.assert_array_equal(own, defined)
