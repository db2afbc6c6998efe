"""The choice of tokens by the kernels for GPUs: the CPU's results, and each row's own bits.

Logits are exact (each row takes one column of the head), so both tables choose from equal values.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.token_choice import (
    COLUMN_LOGPROB,
    COLUMN_RANK,
    COLUMN_STATE,
    COLUMN_TOKEN,
    COLUMN_TOP,
    NUM_TOP,
    STATE_CHOSEN,
    STATE_NONE_ALLOWED,
    STATE_NOT_FINITE,
)
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, StepArrays
from cadenza.request import Request, SamplingParams
from tests.cuda.conftest import on_cpu
from tests.xla.harness import HOSTILE
from tests.xla.rules import PAGE_SIZE, RuledRow, random_row, step_of
from tests.xla.test_rules import SEEING, bare, likely, with_params

pytestmark = [pytest.mark.native, pytest.mark.kernels]

Choose = Callable[..., np.ndarray]
# Tokens of a block's part of a row, and values that a filter searches in shared memory.
SLICE, LISTED = 2048, 3072

ROWS = 10

ROWS_AT_ONCE = 256  # rows whose logits are in memory at the same time
WORDS = slice(COLUMN_TOKEN, COLUMN_LOGPROB), slice(COLUMN_RANK, COLUMN_TOP + NUM_TOP)
FLOATS = slice(COLUMN_LOGPROB, COLUMN_RANK), slice(COLUMN_TOP + NUM_TOP, None)


def choosing(
    make_ops: Callable[[DecoderSpec], OpTable], vocab_size: int, **model: object
) -> Choose:
    config = replace(HOSTILE, vocab_size=vocab_size, **model)
    ops = make_ops(DecoderSpec(model=config, dtype=jnp.float32, page_size=PAGE_SIZE))
    compiled = jax.jit(ops.next_tokens)

    def choose(
        rows: list[RuledRow], step: StepArrays | None = None, x: np.ndarray | None = None
    ) -> np.ndarray:
        columns = np.stack([row.logits for row in rows], axis=1)
        identity = np.eye(len(rows), dtype=np.float32)
        given = identity if x is None else x, ops.load_linear([columns], [])
        return np.asarray(compiled(*given, step_of(rows) if step is None else step))

    return choose


def choosing_on_cpu(vocab_size: int, **model: object) -> Choose:
    return on_cpu(choosing(NativeOps, vocab_size, **model))


@pytest.fixture
def ours(library: CudaLibrary) -> Callable[..., Choose]:
    def make(vocab_size: int, **model: object) -> Choose:
        return choosing(lambda spec: CudaOps(spec, library), vocab_size, **model)

    return make


def batch(vocab_size: int, seed: int = 0, count: int = ROWS) -> list[RuledRow]:
    rng = np.random.default_rng([vocab_size, seed, 44])
    return [random_row(rng, vocab_size) for _ in range(count)]


def floats(columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(columns).view(np.float32)


def assert_equal_but_for_rounding(found: np.ndarray, expected: np.ndarray) -> None:
    for columns in WORDS:
        np.testing.assert_array_equal(found[:, columns], expected[:, columns])
    for columns in FLOATS:
        mine, theirs = floats(found[:, columns]), floats(expected[:, columns])
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [23, 331, SLICE + 77])
def test_rows_with_rules_and_filters_have_the_cpus_results(
    ours: Callable[..., Choose], vocab_size: int
) -> None:
    choose, cpu = ours(vocab_size), choosing_on_cpu(vocab_size)
    for seed in range(2):
        rows = batch(vocab_size, seed)
        rows[3] = with_params(rows[3], allowed_token_ids=(2,), min_tokens=99)  # 2 is a stop token
        found = choose(rows)
        assert_equal_but_for_rounding(found, cpu(rows))
        assert found[3, COLUMN_STATE] == STATE_NONE_ALLOWED
        assert (np.delete(found[:, COLUMN_STATE], 3) == STATE_CHOSEN).any()


def test_filters_that_leave_more_than_shared_memory_holds_leave_what_the_cpu_leaves(
    ours: Callable[..., Choose],
) -> None:
    vocab_size = LISTED + SLICE
    drawn = {"temperature": 3.0, "min_p": 0.0, "top_n_sigma": 0.0, "allowed_token_ids": None}
    wanted = [
        {"top_k": LISTED + 400, "top_p": 1.0},
        {"top_k": 7, "top_p": 0.999},
        {"top_k": 0, "top_p": 0.97},
        {"top_k": LISTED + 1000, "top_p": 0.3},
    ]
    rows = [
        with_params(row, **drawn, **each)
        for row, each in zip(batch(vocab_size, 1, len(wanted)), wanted, strict=True)
    ]
    ties = np.round(rows[0].logits * 4)
    rows[0] = replace(rows[0], logits=ties)
    assert_equal_but_for_rounding(ours(vocab_size)(rows), choosing_on_cpu(vocab_size)(rows))


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_a_row_has_the_same_bits_alone_in_company_and_beside_padding(
    ours: Callable[..., Choose], monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    choose = ours(SLICE + 77)
    rows = [with_params(row, logprobs=20) for row in batch(SLICE + 77, 2, 6)]
    together = choose(rows)
    monkeypatch.setenv("CADENZA_GPU_ORDER", order)
    x = np.eye(len(rows), dtype=np.float32)
    x[4:] = np.nan
    fewer = choose(rows, step_of(rows)._replace(num_logits=np.int32(4)), x)
    np.testing.assert_array_equal(fewer[:4], together[:4])
    assert not fewer[4:].any()
    for index in (1, 3):
        np.testing.assert_array_equal(choose([rows[index]] * 2)[1], together[index])


def test_logits_are_divided_then_capped_and_a_cap_hides_no_infinite_one(
    ours: Callable[..., Choose],
) -> None:
    shape = {"logit_divisor": 1.5, "logit_soft_cap": 6.0}
    rows = [with_params(row, logprobs=20) for row in batch(331, 3)]
    found = ours(331, **shape)(rows)
    assert_equal_but_for_rounding(found, choosing_on_cpu(331, **shape)(rows))
    x = np.eye(len(rows), dtype=np.float32)
    x[5, 5] = np.inf
    spoilt = ours(331, **shape)(rows, x=x)
    assert spoilt[5, COLUMN_STATE] == STATE_NOT_FINITE
    np.testing.assert_array_equal(np.delete(spoilt, 5, axis=0), np.delete(found, 5, axis=0))


def test_a_target_is_reported_in_place_of_a_choice(ours: Callable[..., Choose]) -> None:
    rows = [with_params(row, logprobs=5) for row in batch(331, 4)]
    step = step_of(rows)
    targets = np.where(np.arange(ROWS) % 2, np.arange(ROWS) * 3, -1).astype(np.int32)
    aimed = step._replace(logits=replace(step.logits, targets=jnp.asarray(targets)))
    found = ours(331)(rows, aimed)
    assert_equal_but_for_rounding(found, choosing_on_cpu(331)(rows, aimed))
    np.testing.assert_array_equal(found[1::2, COLUMN_TOKEN], targets[1::2])


def test_the_placeholder_of_images_is_chosen_by_no_row(ours: Callable[..., Choose]) -> None:
    vocab_size = SLICE + 77
    for placeholder in (SLICE, vocab_size - 1):
        assert SEEING is not None
        sees = {"vision": replace(SEEING, image_token_id=placeholder)}
        rows = [
            likely(row if place % 2 else bare(row), placeholder, place)
            for place, row in enumerate(batch(vocab_size, 8, 2 * ROWS))
        ]
        found = ours(vocab_size, **sees)(rows)
        assert_equal_but_for_rounding(found, choosing_on_cpu(vocab_size, **sees)(rows))
        is_chosen = found[:, COLUMN_STATE] == STATE_CHOSEN
        assert (found[is_chosen, COLUMN_TOKEN] != placeholder).all()
        assert (ours(vocab_size)(rows)[:, COLUMN_TOKEN] == placeholder).sum() > ROWS // 2


def test_equal_logits_give_the_lowest_id_even_of_zeros_with_either_sign(
    ours: Callable[..., Choose],
) -> None:
    bare = Request(prompt_token_ids=(1,), params=SamplingParams(temperature=0.0, logprobs=20))
    logits = np.full(331, -1, np.float32)
    logits[[9, 70, 300]] = -0.0, 0.0, 0.0
    found = ours(331)([RuledRow(request=bare, generated=[], logits=logits)])[0]
    assert found[COLUMN_TOKEN] == 9
    assert found[COLUMN_RANK] == 1
    assert found[COLUMN_TOP : COLUMN_TOP + 5].tolist() == [9, 70, 300, 0, 1]


@pytest.mark.parametrize("field", ["targets", "rule_record", "rows", "positions"])
def test_a_row_that_refers_to_nothing_is_reported_and_harms_no_other(
    ours: Callable[..., Choose], field: str
) -> None:
    rows = [with_params(row, presence_penalty=0.5) for row in batch(331, 6, 4)]
    step = step_of(rows)
    choose = ours(331)
    healthy = choose(rows, step)
    strange = np.array(getattr(step.logits, field))
    strange[2] = 1 << 20
    found = choose(rows, step._replace(logits=replace(step.logits, **{field: strange})))
    assert found[2, COLUMN_STATE] == STATE_NOT_FINITE
    np.testing.assert_array_equal(np.delete(found, 2, axis=0), np.delete(healthy, 2, axis=0))


def test_more_rows_than_are_in_memory_at_the_same_time_have_their_own_results(
    ours: Callable[..., Choose],
) -> None:
    few = [with_params(row, logprobs=None, top_p=1.0, top_k=0) for row in batch(23, 7, 4)]
    step, choose = step_of(few), ours(23)
    alone = choose(few, step)
    places = np.arange(ROWS_AT_ONCE + 9) % len(few)
    logits = jax.tree.map(lambda column: np.asarray(column)[places], step.logits)
    count = np.int32(ROWS_AT_ONCE + 6)
    many = step._replace(logits=logits, num_logits=count)
    found = choose(few, many, np.eye(len(few), dtype=np.float32)[places])
    np.testing.assert_array_equal(found[:count], alone[places[:count]])
    assert not found[count:].any()


@pytest.mark.soak
@pytest.mark.parametrize("vocab_size", [23, 331, 2 * SLICE + 1, LISTED * 3])
def test_hundreds_of_rows_have_the_cpus_tokens(
    ours: Callable[..., Choose], vocab_size: int
) -> None:
    choose, cpu = ours(vocab_size), choosing_on_cpu(vocab_size)
    num_rows = num_other = 0
    for seed in range(100, 125):
        rows = batch(vocab_size, seed)
        differ = choose(rows)[:, WORDS[0]] != cpu(rows)[:, WORDS[0]]
        num_rows, num_other = num_rows + len(rows), num_other + int(differ.any(axis=1).sum())
    assert num_other <= num_rows // 200, f"{num_other} of {num_rows} rows differ"
