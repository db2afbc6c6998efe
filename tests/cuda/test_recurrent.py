"""Layers with a state of the kernels for GPUs: their definitions, and a row's own bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, StatePool
from tests.xla.harness import HOSTILE
from tests.xla.test_recurrent_ops import GOING_ON, NUM_TOKENS, PROMPTS, Case, Part, Table, each_case

pytestmark = [pytest.mark.native, pytest.mark.kernels]


def spec_of(dtype: Any) -> DecoderSpec:
    return DecoderSpec(model=HOSTILE, dtype=dtype, page_size=16)


def poison(pool: StatePool) -> StatePool:
    """NaN in every slot: what nobody has kept must not be read."""

    def fill(side: jax.Array) -> jax.Array:
        return jnp.full_like(side, 0x7FC0 if side.dtype == jnp.uint16 else jnp.nan)

    return jax.tree.map(fill, pool)


@each_case
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_layers_with_a_state_compute_the_definition(
    library: CudaLibrary, case: Case, dtype: Any
) -> None:
    ours, reference = (
        Table(ops, case) for ops in (CudaOps(spec_of(dtype), library), OpTable(spec_of(dtype)))
    )
    ours.pool = poison(ours.pool)
    tolerance = 2e-5 if dtype == np.float32 else 2.0**-6
    for seed, parts in ((10, PROMPTS), (20, GOING_ON)):
        given = case.given(seed, dtype)
        found, expected = ours.step(parts, given), reference.step(parts, given)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        kept = sorted({slot for part in parts for slot in part.kept})
        for own, defined in zip(ours.states(kept), reference.states(kept), strict=True):
            np.testing.assert_allclose(own, defined, rtol=2e-5, atol=2e-5)


@each_case
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_a_rows_outputs_depend_neither_on_its_cut_nor_on_its_neighbours_nor_on_padding(
    library: CudaLibrary, monkeypatch: pytest.MonkeyPatch, case: Case, order: str
) -> None:
    given = case.given(30, np.float32)
    whole, cut = (Table(CudaOps(spec_of(np.float32), library), case) for _ in range(2))
    cut.pool = poison(cut.pool)
    none = Part(0, -1)
    expected = whole.step((Part(18, -1, (0,)), none, none, none), given)
    monkeypatch.setenv("CADENZA_GPU_ORDER", order)

    def tokens(*places: int) -> Any:
        """Some tokens of the prompt, with NaN behind them."""

        def take(side: jax.Array) -> jax.Array:
            rows = np.pad(np.array(places), (0, NUM_TOKENS - len(places)))
            is_token = np.arange(NUM_TOKENS)[:, None] < len(places)
            return jnp.where(is_token, side[rows], jnp.nan)

        return jax.tree.map(take, given)

    first = cut.step((Part(2, -1, (3,)), none, Part(4, -1, (1,)), none), tokens(20, 21, 0, 1, 2, 3))
    middle = cut.step((none, Part(1, 3, (3,)), none, Part(1, 1, (1,))), tokens(22, 4))
    rest = cut.step((none, none, none, Part(13, 1, (0,))), tokens(*range(5, 18)))
    np.testing.assert_array_equal(np.concatenate([first[2:], middle[1:], rest]), expected)
    for own, defined in zip(cut.states([0]), whole.states([0]), strict=True):
        np.testing.assert_array_equal(own, defined)
