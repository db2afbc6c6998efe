"""The tower of a model that sees, in quanta: exact whatever runs beside it, as its witness says.

A runner of each table encodes drawn tiles; everything that no program wrote is NaN.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cadenza.backends.base import ImageRunner, RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.reference_tower import ReferenceTower
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.backends.xla.vision.stages import tower_state
from cadenza.batch.step_schema import ImageCall, ModelInputs
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.errors import RunnerError
from cadenza.request import Attachment
from cadenza.vision.processor import ImagePart
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.test_no_compile import compile_count

SIDE, TOKENS = 84, 6
NUM_SLOTS = 100
BUCKET, ROWS = 8, 2

LIMITS = EngineLimits(
    max_num_seqs=ROWS,
    max_num_batched_tokens=BUCKET,
    max_model_len=64,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=1,
)

Rows = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shape = replace(named_shape("tiny-smolvlm"), num_layers=1)
    write_random_checkpoint(shape, folder, seed=1, dtype="float32")
    return open_checkpoint(folder)


OPS: dict[str, MakeOps] = {"native": NativeOps, "reference": OpTable}


@pytest.fixture(
    scope="module", params=[pytest.param("native", marks=pytest.mark.native), "reference"]
)
def warm(model: Checkpoint, request: pytest.FixtureRequest) -> XlaRunner:
    setup = RunnerSetup(limits=LIMITS, num_image_slots=NUM_SLOTS, fill=float("nan"))
    runner = XlaRunner(model.config, model.weights, setup, OPS[request.param])
    runner.warmup()
    return runner


@pytest.fixture
def runner(warm: XlaRunner) -> XlaRunner:
    warm.reset()
    return warm


def tile(seed: int) -> Attachment:
    pixels = np.random.default_rng(seed).integers(0, 256, SIDE * SIDE * 3, np.uint8).tobytes()
    return Attachment(
        start=0,
        length=TOKENS**2,
        digest=bytes([seed]),
        payload=pixels,
        width=SIDE,
        height=SIDE,
        rows=TOKENS,
        columns=TOKENS,
    )


def step_of(*calls: ImageCall) -> ModelInputs:
    return replace(ModelInputs.empty(bucket=BUCKET, num_rows=ROWS), image_calls=calls)


def slots_from(first: int) -> Rows:
    """Not in order, so that a row in a neighbour's slot is seen."""
    return np.arange(first, first + TOKENS**2, dtype=np.int32)[::-1].copy()


def encode(runner: XlaRunner, part: Attachment, slots: Rows, cuts: list[int] | None = None) -> Rows:
    total = len(runner.image_work(part))
    stops = [*(cuts or []), total]
    for start, stop in zip([0, *stops], stops, strict=False):
        call = ImageCall(attachment=part, start=start, stop=stop, slots=slots)
        runner.launch(step_of(call)).result()
    return all_rows(runner)[slots]


def all_rows(runner: XlaRunner) -> Rows:
    state = runner.state_holder.state
    assert state is not None
    return np.array(state.image_rows)


def test_rows_of_a_tile_are_those_of_the_witness(runner: XlaRunner, model: Checkpoint) -> None:
    part = ImagePart(width=SIDE, height=SIDE, rows=TOKENS, columns=TOKENS)
    assert model.config.vision is not None
    witness = ReferenceTower(model.config.vision, model.weights)
    expected = witness.embed(part, tile(1).payload)
    found = encode(runner, tile(1), slots_from(3))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(encode(runner, tile(2), slots_from(3)) - expected).max() > 0.1


def test_bits_do_not_depend_on_how_quanta_are_cut(runner: XlaRunner) -> None:
    at_once = encode(runner, tile(1), slots_from(0))
    total = len(runner.image_work(tile(1)))
    runner.reset()
    one_by_one = encode(runner, tile(1), slots_from(0), list(range(1, total)))
    assert at_once.tobytes() == one_by_one.tobytes()


def test_bits_do_not_depend_on_what_was_encoded_before(runner: XlaRunner) -> None:
    alone = encode(runner, tile(1), slots_from(0))
    runner.reset()
    encode(runner, tile(2), slots_from(50))
    assert np.isfinite(alone).all()
    assert encode(runner, tile(1), slots_from(10)).tobytes() == alone.tobytes()


def test_an_image_is_written_to_its_slots_alone(runner: XlaRunner) -> None:
    first = encode(runner, tile(1), slots_from(0))
    encode(runner, tile(2), slots_from(40))
    rows = all_rows(runner)
    assert rows[slots_from(0)].tobytes() == first.tobytes()
    assert np.isnan(np.delete(rows, np.r_[0 : TOKENS**2, 40 : 40 + TOKENS**2], axis=0)).all()


def test_a_step_encodes_several_images_in_order(runner: XlaRunner) -> None:
    total = len(runner.image_work(tile(1)))
    calls = [
        ImageCall(attachment=tile(seed), start=0, stop=total, slots=slots_from(first))
        for seed, first in ((1, 0), (2, 40))
    ]
    runner.launch(step_of(*calls)).result()
    rows = all_rows(runner)
    together = rows[slots_from(0)], rows[slots_from(40)]
    runner.reset()
    for seed, found in zip((1, 2), together, strict=True):
        assert encode(runner, tile(seed), slots_from(60)).tobytes() == found.tobytes()


def test_nothing_compiles_while_images_are_encoded(runner: XlaRunner) -> None:
    with compile_count() as seen:
        total = len(runner.image_work(tile(1)))
        for start in range(total):
            call = ImageCall(
                attachment=tile(1), start=start, stop=start + 1, slots=slots_from(start)
            )
            runner.launch(step_of(call)).result()
    assert not seen


def test_a_reset_forgets_all_embeddings(runner: XlaRunner) -> None:
    encode(runner, tile(1), slots_from(0))
    runner.reset()
    assert np.isnan(all_rows(runner)).all()


def test_a_part_that_does_not_fit_is_refused_and_changes_nothing(runner: XlaRunner) -> None:
    good = encode(runner, tile(1), slots_from(0))
    total = len(runner.image_work(tile(1)))
    for wrong in (
        replace(tile(2), payload=b"\0" * 10),
        replace(tile(2), rows=TOKENS + 1),
        replace(tile(2), rows=0),
    ):
        call = ImageCall(attachment=wrong, start=0, stop=total, slots=slots_from(0))
        with pytest.raises(RunnerError, match="an image part of"):
            runner.launch(step_of(call))
    assert all_rows(runner)[slots_from(0)].tobytes() == good.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param("native", marks=pytest.mark.native), "reference"])
def test_memory_that_is_filled_has_no_number_in_any_type(
    model: Checkpoint, name: str, dtype: str
) -> None:
    spec = DecoderSpec(model=model.config, dtype=jnp.dtype(dtype), page_size=16)
    setup = RunnerSetup(limits=LIMITS, num_image_slots=NUM_SLOTS, fill=float("nan"))
    state = jax.jit(lambda: tower_state(OPS[name](spec), spec, setup))()
    for array in map(np.asarray, jax.tree.leaves(state)):
        numbers = array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
        assert np.isnan(numbers.astype(np.float32)).all()


def test_a_runner_with_slots_has_the_capability(runner: XlaRunner) -> None:
    assert isinstance(runner, ImageRunner)
    assert runner.num_image_slots == NUM_SLOTS
    assert "attachments" in runner.capabilities


def test_work_counts_products_and_attention(runner: XlaRunner) -> None:
    work = runner.image_work(tile(1))
    patches, width, inner = 144, 48, 88
    per_layer = patches * width * (4 * width + 2 * inner)
    entry, exit_ = patches * 147 * width, 36 * 4 * width * 96
    assert work.products.sum() == 2 * (entry + 3 * per_layer + exit_)
    assert work.attention.sum() == 3 * 4 * patches * patches * width
    assert (work.products + work.attention)[:-1].min() > 0
