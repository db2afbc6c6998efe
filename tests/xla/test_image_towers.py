"""The towers of each family, in quanta, beside their witness: reference operations alone."""

from pathlib import Path

import jax
import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.reference_tower import ReferenceTower
from cadenza.backends.xla.vision.encoder import ImageEncoder, tower_spec
from cadenza.backends.xla.vision.stages import tower_state
from cadenza.batch.step_schema import ImageCall
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.request import Attachment
from tests.checkpoint.config_writer import write_random_checkpoint

SHAPES = (
    "tiny-gemma3-vl",
    "tiny-gemma4-vl",
    "tiny-gemma4-moe-vl",
    "tiny-gemma4-unified-vl",
    "tiny-mistral3-vl",
)
NUM_SLOTS = 80
LIMITS = EngineLimits(
    max_num_seqs=1,
    max_num_batched_tokens=1,
    max_model_len=16,
    page_size=16,
    num_pages=1,
    max_num_queued_reqs=1,
)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_an_image_are_those_of_the_witness(name: str, tmp_path: Path) -> None:
    write_random_checkpoint(named_shape(name), tmp_path / "model", seed=3, dtype="float32")
    model = open_checkpoint(tmp_path / "model")
    vision = model.config.vision
    assert vision == named_shape(name).vision, "what was written is read"
    assert vision is not None
    spec = DecoderSpec(model=model.config, dtype=np.float32, page_size=16)
    setup = RunnerSetup(limits=LIMITS, num_image_slots=NUM_SLOTS, fill=float("nan"))
    encoder, device = ImageEncoder(spec, OpTable), jax.devices()[0]
    encoder.load(model.weights, device)
    state = tower_state(OpTable(tower_spec(spec)), spec, setup)
    assert state is not None
    image_rows = np.full((NUM_SLOTS, model.config.hidden_size), np.nan, np.float32)
    sharding = jax.sharding.SingleDeviceSharding(device)
    encoder.compile(jax.eval_shape(lambda: state), jax.eval_shape(lambda: image_rows), sharding)
    part = vision.processor.plan(200, 60).parts[0]
    pixels = np.random.default_rng(4).integers(0, 256, part.num_bytes, np.uint8).tobytes()
    attachment = Attachment(
        start=0,
        length=part.num_tokens,
        digest=b"x",
        payload=pixels,
        width=part.width,
        height=part.height,
        rows=part.rows,
        columns=part.columns,
    )
    slots = np.arange(part.num_tokens, dtype=np.int32)[::-1].copy()
    total = len(encoder.work(attachment))
    calls = [
        ImageCall(attachment=attachment, start=start, stop=stop, slots=slots)
        for start, stop in ((0, total // 2), (total // 2, total))
    ]
    encoder.check(calls)
    _, found = encoder.run(state, jax.device_put(image_rows, device), calls)
    expected = ReferenceTower(vision, model.weights).embed(part, pixels)
    np.testing.assert_allclose(np.array(found)[slots], expected, atol=1e-4, rtol=1e-4)
    assert np.isnan(np.array(found)[part.num_tokens :]).all()
