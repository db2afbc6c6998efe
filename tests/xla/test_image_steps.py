"""Tokens that have the embedding of an image, and positions with three coordinates, in a step."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.reference_tower import ReferenceTower
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.vision.encoder import ImageEncoder, tower_spec
from cadenza.backends.xla.vision.stages import tower_state
from cadenza.batch.step_schema import ImageCall
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.models.model_config import ModelConfig
from cadenza.models.tower_spec import declare_tower
from cadenza.request import Attachment
from cadenza.vision.tower_config import ProjectorConfig, ProjectorLinear
from cadenza.weights.tensor_spec import tensors_of
from cadenza.weights.weights import Weights, open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.contract.steps import Draw, Stream, build_inputs
from tests.xla.harness import BASE, Lab
from tests.xla.test_step_exactness import geometry_of

IMAGE, FILL, SLOT = 200, 0, 3
SEEING = named_shape("tiny-smolvlm").vision
assert SEEING is not None
TOWER = replace(
    SEEING.tower,
    projector=replace(
        SEEING.tower.projector,
        linears=(ProjectorLinear(name="model.connector.proj", num_out=40, has_bias=False),),
    ),
    deepstack_layers=(0,),
    deepstack=ProjectorConfig(
        side=2,
        linears=(ProjectorLinear(name="model.connector.{index}", num_out=40, has_bias=False),),
    ),
)
VARIANT = replace(BASE, shape="two layers of hostile", bucket=16, ops=OpTable)
PROMPT = [5, 17, 9, 40]


@pytest.fixture(scope="module")
def runner(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[XlaRunner]:
    model = replace(
        VARIANT.config, rope=replace(VARIANT.config.rope, axes=(0, 1, 2, 0, 1, 2, 0, 0))
    )
    vision = replace(SEEING, tower=TOWER, image_token_id=IMAGE, fill_token_id=FILL)
    model = replace(model, vision=vision)
    setup = replace(VARIANT.setup, num_image_slots=8)
    weights = with_tower(lab.weights("hostile"), model, tmp_path_factory.mktemp("tower") / "model")
    with closing(XlaRunner(model, weights, setup, OpTable)) as runner:
        runner.warmup()
        yield runner


def with_tower(text: Weights, model: ModelConfig, folder: Path) -> Weights:
    write_random_checkpoint(replace(model, num_layers=1), folder, seed=0, dtype="float32")
    stored = open_weights(folder)
    assert model.vision is not None
    names = [spec.name for spec in tensors_of(declare_tower(model.vision))]
    tensors = {**text.tensors, **{name: stored.tensors[name] for name in names}}
    return Weights(files=(*text.files, *stored.files), tensors=tensors)


def step(runner: XlaRunner, prompt: list[int], *, slot: int = -1, height: int = 0) -> bytes:
    """The results of a prompt whose second token has an image slot, and is `height` rows lower."""
    stream = Stream(row=0, pages=[0], draw=Draw(num_logprobs=5))
    chunk = stream.chunk(prompt, samples=True)
    inputs = build_inputs([chunk], geometry_of(VARIANT))
    tokens = inputs.tokens
    tokens.rope_positions[:] = tokens.positions[:, None]
    tokens.rope_positions[1, 1] += height
    tokens.image_slots[1] = slot
    found = runner.launch(inputs).result()
    return b"".join(np.asarray(each).tobytes() for each in (found.token_ids, found.top_logprobs))


def see(runner: XlaRunner, token_id: int, *, added: float = 0.0) -> None:
    runner.reset()
    state = runner._state
    assert state is not None
    (embedding,) = np.asarray(runner.weights.embedding.weight)[[token_id]]
    row = np.concatenate([embedding, np.full_like(embedding, added)])
    runner._state = state._replace(image_rows=jnp.asarray(state.image_rows).at[SLOT].set(row))


def test_a_token_with_an_image_slot_has_the_embedding_in_it_and_no_other(runner: XlaRunner):
    see(runner, 17)
    expected = step(runner, PROMPT)
    seen = [PROMPT[0], IMAGE, *PROMPT[2:]]
    assert step(runner, seen, slot=SLOT) == expected, "other slots hold NaN"
    assert step(runner, seen) != expected


def test_an_id_outside_the_vocabulary_may_stand_for_an_image(runner: XlaRunner):
    see(runner, 17)
    assert step(runner, [PROMPT[0], 1 << 20, *PROMPT[2:]], slot=SLOT) == step(runner, PROMPT)


def test_further_parts_are_added_behind_the_first_layers(runner: XlaRunner):
    see(runner, 17)
    expected = step(runner, PROMPT)
    see(runner, 17, added=0.25)
    seen = [PROMPT[0], IMAGE, *PROMPT[2:]]
    assert step(runner, seen, slot=SLOT) != expected
    assert step(runner, PROMPT) == expected, "text has nothing of it"


def test_each_pair_of_a_head_turns_by_the_coordinate_of_its_axis(runner: XlaRunner):
    see(runner, 17)
    assert step(runner, PROMPT, height=2) != step(runner, PROMPT)


def test_equal_coordinates_give_the_bits_of_plain_positions(lab: Lab, runner: XlaRunner):
    see(runner, 17)
    plain = lab.runner(VARIANT)
    assert step(runner, PROMPT) == step(plain, PROMPT)


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
