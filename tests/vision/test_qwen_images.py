"""Sizes, tokens, pixels and patches of the Qwen processors, without any model."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from cadenza.errors import InvalidRequestError
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import ImagePart, Run
from cadenza.vision.whole_images import QwenImages

QWEN3_VL = QwenImages(
    patch_size=16,
    merge_size=2,
    temporal_size=2,
    min_pixels=65_536,
    max_pixels=16_777_216,
    resample="bicubic",
    normalisation=Normalisation(),
    max_tokens=16_384,
)
NORMALISATION = Normalisation(mean=(0.5, 0.25, 0.125), std=(0.5, 0.25, 0.5))
SMALL = QwenImages(
    patch_size=4,
    merge_size=2,
    temporal_size=2,
    min_pixels=64,
    max_pixels=64 * 64,
    resample="bicubic",
    normalisation=NORMALISATION,
    max_tokens=64,
)


def limited(max_tokens: int) -> QwenImages:
    return replace(QWEN3_VL, max_tokens=max_tokens)


def picture(width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(levels.astype(np.uint8))


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
        (2000, 2000, (1984, 1984)),
        (1920, 1080, (1920, 1088)),
        (640, 480, (640, 480)),
        (640, 144, (640, 128)),  # 4.5 tokens are rounded to the even number
        (100, 100, (256, 256)),
        (5000, 5000, (4096, 4096)),
        (1, 200, (32, 3648)),
    ],
)
def test_sides_become_multiples_of_a_token(width: int, height: int, resized: tuple[int, int]):
    (part,) = QWEN3_VL.plan(width, height).parts
    assert (part.width, part.height) == resized
    assert (part.columns, part.rows) == (resized[0] // 32, resized[1] // 32)


def test_all_tokens_of_an_image_are_one_run():
    plan = QWEN3_VL.plan(640, 480)
    assert plan.pieces == (Run(0, 300),)
    assert plan.num_tokens == 300


def test_an_image_of_low_detail_has_at_most_256_tokens():
    assert QWEN3_VL.plan(2000, 2000, "low").num_tokens == 256
    assert QWEN3_VL.plan(300, 300, "low") == QWEN3_VL.plan(300, 300)


@pytest.mark.parametrize("limit", [1, 7, 64, 255, 4096])
@pytest.mark.parametrize("size", [(3000, 2000), (1, 200), (4000, 20), (30, 40), (16, 16)])
def test_no_image_exceeds_the_limit_of_tokens(limit: int, size: tuple[int, int]):
    (part,) = limited(limit).plan(*size).parts
    assert 1 <= part.num_tokens <= limit
    limited(limit).check(part)


def test_a_limit_beyond_the_files_own_changes_nothing():
    assert limited(1 << 20).plan(5000, 3000) == QWEN3_VL.plan(5000, 3000)


def test_a_side_above_200_times_the_other_is_refused():
    QWEN3_VL.plan(400, 2)
    with pytest.raises(InvalidRequestError, match=r"401 x 2 pixels; .* at most 200 times"):
        QWEN3_VL.plan(401, 2)


@pytest.mark.parametrize(
    "forged",
    [
        ImagePart(width=640, height=480, rows=15, columns=21),
        ImagePart(width=480, height=640, rows=15, columns=20),
        ImagePart(width=0, height=0, rows=0, columns=0),
        ImagePart(width=32 * 200, height=32 * 200, rows=200, columns=200),
    ],
)
def test_a_grid_that_no_plan_has_is_refused(forged: ImagePart):
    with pytest.raises(InvalidRequestError, match="32 x 32 pixels"):
        QWEN3_VL.check(forged)


def test_pixels_are_those_of_pillows_bicubic_resampling():
    image = picture(37, 21)
    (pixels,) = SMALL.prepare(image)
    (part,) = SMALL.plan(37, 21).parts
    assert pixels == image.resize((part.width, part.height), Image.Resampling.BICUBIC).tobytes()
    assert len(pixels) == part.num_bytes


def test_patches_come_by_blocks_with_their_values_by_channel_time_row_and_column():
    (pixels,), (part,) = SMALL.prepare(picture(40, 24)), SMALL.plan(40, 24).parts
    assert (part.rows, part.columns) == (3, 5)
    rows = SMALL.patches(pixels, part)
    assert rows.shape == (3 * 5 * 4, 3 * 2 * 4 * 4)
    assert rows.dtype == np.float32
    levels = np.frombuffer(pixels, np.uint8).reshape(24, 40, 3)
    # The patch of block (1, 3) at row 1 and column 0 within it.
    row = rows[(1 * 5 + 3) * 4 + 2].reshape(3, 2, 4, 4)
    patch = levels[12:16, 24:28].astype(np.float64)
    for channel, (mean, std) in enumerate(zip(NORMALISATION.mean, NORMALISATION.std, strict=True)):
        scaled = (patch[:, :, channel] * (1 / 255)).astype(np.float32)
        expected = (scaled - np.float32(mean)) / np.float32(std)
        assert np.array_equal(row[channel, 0], expected)
        assert np.array_equal(row[channel, 1], expected)


def test_settings_tell_processors_apart_that_give_other_pixels():
    assert limited(16_384).settings == QWEN3_VL.settings
    assert SMALL.settings != QWEN3_VL.settings
