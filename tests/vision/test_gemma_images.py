"""Sizes, words and patches of Gemma's and Pixtral's images."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from cadenza.errors import InvalidRequestError
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import ImagePart, Run
from cadenza.vision.whole_images import (
    BUDGETS,
    Gemma3Images,
    Gemma4Images,
    PixtralImages,
    budget_within,
)

PIXTRAL = PixtralImages(
    longest_edge=1540, patch_size=14, merge_size=2, normalisation=Normalisation(), max_tokens=4096
)


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(1)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def test_gemma_3_makes_every_image_a_square_of_256_tokens():
    plan = Gemma3Images().plan(1920, 1080)
    assert plan.parts == (ImagePart(width=896, height=896, rows=16, columns=16),)
    begin, run, end = plan.pieces
    assert (begin, run, end) == ("\n\n<start_of_image>", Run(0, 256), "<end_of_image>\n\n")


@pytest.mark.parametrize(
    ("width", "height", "rows", "columns"),
    [(1920, 1080, 12, 22), (100, 100, 16, 16), (1, 5000, 280, 1), (5000, 1, 1, 280)],
)
def test_gemma_4_fills_its_budget_whatever_the_size(
    width: int, height: int, rows: int, columns: int
):
    plan = Gemma4Images().plan(width, height)
    assert plan.parts == (
        ImagePart(width=48 * columns, height=48 * rows, rows=rows, columns=columns),
    )
    assert plan.pieces == ("<|image>", Run(0, rows * columns), "<image|>")


def test_low_detail_is_the_least_budget_of_gemma_4():
    assert Gemma4Images(max_tokens=1120).plan(800, 600, "low").num_tokens == 63
    assert Gemma4Images(max_tokens=70).plan(800, 600).num_tokens == 63


def test_a_budget_is_the_largest_within_the_tokens_allowed():
    assert [budget_within(most) for most in (69, 70, 279, 4096)] == [None, 70, 140, 1120]
    assert budget_within(BUDGETS[2]) == 280


def test_pixtral_ends_each_row_with_a_token_of_its_own():
    plan = PIXTRAL.plan(60, 80)
    row = Run(0, 3)
    assert plan.parts == (ImagePart(width=84, height=84, rows=3, columns=3),)
    assert plan.pieces == (row, "[IMG_BREAK]", row, "[IMG_BREAK]", row, "[IMG_END]")


@pytest.mark.parametrize("limit", [1, 7, 50, 256])
@pytest.mark.parametrize("size", [(1600, 1600), (9000, 30), (28, 4000), (1, 1), (1, 6000)])
def test_pixtral_stays_within_its_limit_of_tokens(limit: int, size: tuple[int, int]):
    few = replace(PIXTRAL, max_tokens=limit)
    (part,) = few.plan(*size).parts
    assert 1 <= part.num_tokens <= limit
    few.check(part)


@pytest.mark.parametrize("ours", [Gemma3Images(), Gemma4Images(), PIXTRAL])
def test_a_forged_grid_is_refused(ours: Gemma3Images | Gemma4Images | PixtralImages):
    (part,) = ours.plan(300, 200).parts
    ours.check(part)
    for rows, columns in ((part.rows + 1, part.columns), (part.columns * part.rows, 1), (0, 0)):
        forged = ImagePart(width=part.width, height=part.height, rows=rows, columns=columns)
        with pytest.raises(InvalidRequestError, match="tokens"):
            ours.check(forged)


@pytest.mark.parametrize("ours", [Gemma3Images(), Gemma4Images(), PIXTRAL])
def test_a_token_is_a_block_of_consecutive_patches(
    ours: Gemma3Images | Gemma4Images | PixtralImages,
):
    """Of an image that differs in one token's pixels only that block differs."""
    one = picture(300, 200)
    (part,) = ours.plan(*one.size).parts
    (pixels,) = ours.prepare(one)
    levels = np.frombuffer(pixels, np.uint8).reshape(part.height, part.width, 3).copy()
    unit, row, column = part.height // part.rows, part.rows - 1, 1
    inside = slice(row * unit, (row + 1) * unit), slice(column * unit, (column + 1) * unit)
    levels[inside] ^= 255
    before, after = ours.patches(pixels, part), ours.patches(levels.tobytes(), part)
    block = len(before) // part.num_tokens
    changed = np.flatnonzero((before != after).any(axis=1))
    first = (row * part.columns + column) * block
    assert changed.tolist() == list(range(first, first + block))


def test_settings_tell_processors_apart():
    found = {
        each.settings
        for each in (
            Gemma3Images(),
            Gemma3Images(side=448),
            Gemma4Images(),
            Gemma4Images(max_tokens=70),
            Gemma4Images(is_unified=True),
            PIXTRAL,
        )
    }
    assert len(found) == 6
