"""The plan of a model that sees: its tower, the memory that it computes in, and image slots."""

from dataclasses import replace

import pytest

from cadenza.backends.base import BackendTraits
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig, ImageLimits
from cadenza.errors import ConfigError
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.plan import make_plan
from cadenza.vision.quanta import Workspace
from tests.checkpoint.config_writer import write_random_checkpoint

TRAITS = BackendTraits(
    name="test",
    ops="test",
    exactness="bitwise",
    dtypes=("float32",),
    dtype_for={"float32": "float32"},
    max_num_batched_tokens=64,
    device_memory_bytes=None,
    capabilities=frozenset({"attachments"}),
)
PLENTY = 4 << 30
SLOT_BYTES = 4 * 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    write_random_checkpoint(named_shape("tiny-smolvlm"), folder, seed=0, dtype="float32")
    return open_checkpoint(folder)


def blind(model: Checkpoint) -> Checkpoint:
    return replace(model, known=(replace(model.config, vision=None), model.weights))


def plan(model: Checkpoint, traits: BackendTraits = TRAITS, **options: int) -> EnginePlan:
    return make_plan(EngineConfig(**options), model, traits, PLENTY)  # pyright: ignore[reportArgumentType]


def test_slots_are_those_that_fit_the_bytes_for_embeddings(model: Checkpoint):
    found = plan(model, image_cache_bytes=100 * SLOT_BYTES + 1)
    assert found.num_image_slots == 100
    assert found.limits.images == ImageLimits(token_id=7, num_slots=100, has_rope_axes=False)
    vision = model.config.vision
    assert vision is not None
    work = Workspace.of(vision).num_bytes(vision, 96, 4)
    assert found.image_bytes == 100 * SLOT_BYTES + work
    assert work >= 4 * (144 * 48 + 3 * 144 * 48 + 36 * 96)


def test_what_is_planned_has_the_tower_and_the_images(model: Checkpoint):
    seeing = plan(model, image_cache_bytes=100 * SLOT_BYTES, num_pages=8)
    text = plan(blind(model), num_pages=8)
    assert seeing.weight_bytes > text.weight_bytes
    assert seeing.planned_bytes - text.planned_bytes == (
        seeing.weight_bytes - text.weight_bytes + seeing.image_bytes
    )
    assert text.num_image_slots == text.image_bytes == 0


def test_an_image_that_does_not_fit_is_refused_with_the_flag_to_set(model: Checkpoint):
    with pytest.raises(ConfigError, match=f"set --image-cache-bytes {36 * SLOT_BYTES}"):
        plan(model, image_cache_bytes=35 * SLOT_BYTES)
    assert plan(model, image_cache_bytes=36 * SLOT_BYTES).num_image_slots == 36


def test_a_backend_that_encodes_no_images_plans_none(model: Checkpoint):
    found = plan(model, replace(TRAITS, capabilities=frozenset()))
    assert found.num_image_slots == found.image_bytes == 0
    assert found.limits.images is None
