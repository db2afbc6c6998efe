"""Our processors of Gemma and Pixtral against transformers' with Pillow: sizes, and pixel values to
the bit."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from cadenza.vision.patches import Normalisation
from cadenza.vision.whole_images import BUDGETS, Gemma3Images, Gemma4Images, PixtralImages

pytestmark = pytest.mark.oracle

NUM_SIZES = 10_000
CLIP = Normalisation(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)


def random_sizes() -> list[list[int]]:
    sizes = np.exp(np.random.default_rng(46).uniform(0, np.log(6000), (NUM_SIZES, 2)))
    return sizes.astype(np.int64).tolist()


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(7)
    sizes = [(37, 53), (300, 200), (64, 700), (1000, 40), (896, 896), (1, 9), (768, 768)]
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]


def places_in_blocks(rows: int, columns: int, merge: int) -> np.ndarray:
    """[N, 2]: column and row of each patch of rows x columns blocks, block by block."""
    grid = np.mgrid[: rows * merge, : columns * merge]  # [2, y, x]
    blocks = grid.reshape(2, rows, merge, columns, merge).transpose(1, 3, 2, 4, 0)
    return np.ascontiguousarray(blocks.reshape(-1, 2)[:, ::-1])


def in_raster(patches: np.ndarray, rows: int, columns: int, merge: int) -> np.ndarray:
    """Patches in blocks, row by row over the whole image."""
    column, row = places_in_blocks(rows, columns, merge).T
    found = np.empty_like(patches)
    found[row * columns * merge + column] = patches
    return found


def pixtral(longest_edge: int, merge_size: int) -> PixtralImages:
    return PixtralImages(
        longest_edge=longest_edge,
        patch_size=14,
        merge_size=merge_size,
        normalisation=CLIP,
        max_tokens=1 << 20,
    )


@pytest.mark.parametrize("budget", BUDGETS)
def test_gemma_4_sizes_are_those_of_transformers(budget: int):
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    ours = Gemma4Images(max_tokens=budget)
    for width, height in random_sizes():
        (part,) = ours.plan(width, height).parts
        expected = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        assert (part.height, part.width) == expected
        ours.check(part)


@pytest.mark.parametrize(("longest_edge", "merge_size"), [(1540, 2), (1024, 1), (280, 2)])
def test_pixtral_sizes_are_those_of_transformers(longest_edge: int, merge_size: int):
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    ours, unit = pixtral(longest_edge, merge_size), 14 * merge_size
    num_failed = 0
    for width, height in random_sizes():
        blank = np.broadcast_to(np.uint8(0), (height, width, 3))
        expected = get_resize_output_image_size(blank, longest_edge, unit, ChannelDimension.LAST)
        if not all(expected):  # where the definition fails, a side has one row or column of tokens
            num_failed += 1
            continue
        (part,) = ours.plan(width, height).parts
        assert (part.height, part.width) == expected
        ours.check(part)
    assert num_failed < NUM_SIZES // 5


def test_gemma_3_pixels_are_those_of_transformers():
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    ours = Gemma3Images()
    theirs: Any = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    for picture in pictures():
        (part,) = ours.plan(*picture.size).parts
        (pixels,) = ours.prepare(picture)
        raster = in_raster(ours.patches(pixels, part), part.rows, part.columns, 4)
        expected = np.asarray(theirs(picture, return_tensors="np")["pixel_values"])[0]
        split = expected.reshape(3, 64, 14, 64, 14).transpose(1, 3, 0, 2, 4)
        assert np.array_equal(raster, split.reshape(4096, -1))


@pytest.mark.parametrize("budget", [70, 280])
def test_gemma_4_pixels_are_those_of_transformers(budget: int):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    ours, theirs = Gemma4Images(max_tokens=budget), Gemma4ImageProcessorPil(max_soft_tokens=budget)
    for picture in pictures():
        (part,) = ours.plan(*picture.size).parts
        (pixels,) = ours.prepare(picture)
        patches = ours.patches(pixels, part)
        found: Any = theirs(picture, return_tensors="np")
        expected = np.asarray(found["pixel_values"])[0, : len(patches)]
        assert int(found["num_soft_tokens_per_image"][0]) == part.num_tokens
        # The model's first step, which is exact, is the processor's here.
        raster = in_raster(patches, part.rows, part.columns, 3)
        assert np.array_equal(raster, 2 * (expected - np.float32(0.5)))
        places = np.asarray(found["image_position_ids"])[0, : len(patches)]
        by_block = places_in_blocks(part.rows, part.columns, 3)
        assert np.array_equal(in_raster(by_block, part.rows, part.columns, 3), places)


def test_unified_patches_are_those_of_transformers_joined_to_whole_tokens():
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    ours, theirs = Gemma4Images(is_unified=True), Gemma4ImageProcessorPil()
    for picture in pictures():
        (part,) = ours.plan(*picture.size).parts
        (pixels,) = ours.prepare(picture)
        found: Any = theirs(picture, return_tensors="np")
        small = np.asarray(found["pixel_values"])[0, : part.num_tokens * 9]
        whole = small.reshape(part.rows, 3, part.columns, 3, 16, 16, 3).transpose(
            0, 2, 1, 4, 3, 5, 6
        )
        assert np.array_equal(whole.reshape(part.num_tokens, -1), ours.patches(pixels, part))


@pytest.mark.parametrize("merge_size", [1, 2])
def test_pixtral_pixels_are_those_of_transformers(merge_size: int):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    ours, unit = pixtral(280, merge_size), 14 * merge_size
    theirs: Any = PixtralImageProcessorPil(
        size={"longest_edge": 280}, patch_size={"height": unit, "width": unit}
    )
    for picture in pictures():
        if min(picture.size) * 280 < max(picture.size):
            continue
        (part,) = ours.plan(*picture.size).parts
        (pixels,) = ours.prepare(picture)
        rows, columns = part.rows * merge_size, part.columns * merge_size
        raster = in_raster(ours.patches(pixels, part), part.rows, part.columns, merge_size)
        expected = np.asarray(theirs(picture, return_tensors="np")["pixel_values"])[0]
        split = expected.reshape(3, rows, 14, columns, 14).transpose(1, 3, 0, 2, 4)
        assert np.array_equal(raster, split.reshape(rows * columns, -1))
