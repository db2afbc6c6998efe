"""Our processor of Idefics3 and SmolVLM against transformers' with Pillow: tiles, words, pixels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cadenza.vision.idefics3 import Idefics3Processor
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import Run

pytestmark = pytest.mark.oracle

NUM_SIZES = 10_000
HALF = (0.5, 0.5, 0.5)
SETTINGS = {
    "smolvlm2-500m": (2048, 512, 16, 4),
    "smolvlm2-2.2b": (1536, 384, 14, 3),
    "idefics3-8b": (1456, 364, 14, 2),
    "small": (96, 32, 4, 2),
}
"""Longest edge, side of tiles and of patches in pixels, patches of a token's side."""


def ours(name: str, *, splits: bool = True) -> Idefics3Processor:
    edge, tile, patch, merge = SETTINGS[name]
    return Idefics3Processor(
        longest_edge=edge,
        tile=tile,
        patch_size=patch,
        merge=merge,
        splits=splits,
        resample="lanczos",
        normalisation=Normalisation(mean=HALF, std=HALF),
    )


def theirs(name: str, *, splits: bool = True) -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    edge, tile, _, _ = SETTINGS[name]
    return SmolVLMImageProcessorPil(
        size={"longest_edge": edge},
        max_image_size={"longest_edge": tile},
        do_image_splitting=splits,
        image_mean=list(HALF),
        image_std=list(HALF),
    )


def random_sizes(count: int, longest: int) -> Iterator[tuple[int, int]]:
    """Widths and heights, small and large, square and narrow."""
    rng = np.random.default_rng(0)
    for exponents in rng.uniform(0, np.log(longest), (count, 2)):
        width, height = np.exp(exponents)
        yield int(width) + 1, int(height) + 1


class Hollow:
    """An image that has a size and no pixels, as the processor's methods see it."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


def grid_of(processor: Any, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of tiles by transformers' own methods, without any pixel."""
    from transformers.image_utils import SizeDict
    from transformers.models.smolvlm import image_processing_pil_smolvlm as module

    edge, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
    found = module.get_resize_output_image_size(Hollow(height, width), resolution_max_side=edge)
    sizes: list[tuple[int, int]] = []

    class Sized(type(processor)):
        def resize(self, image: Any, size: SizeDict, **_: Any) -> Any:
            sizes.append((size.height, size.width))
            return Hollow(size.height, size.width)

    sized = Sized()
    sized.resize_for_vision_encoder(Hollow(*found), tile)
    second_height, second_width = sizes[0]
    if second_height <= tile and second_width <= tile:
        return 0, 0
    return (second_height - tile) // tile + 1, (second_width - tile) // tile + 1


@pytest.mark.parametrize("name", SETTINGS)
def test_tiles_of_random_sizes_are_those_of_transformers(name: str):
    processor, other = ours(name), theirs(name)
    for width, height in random_sizes(NUM_SIZES // len(SETTINGS), 8000):
        rows, columns = grid_of(other, width, height)
        plan = processor.plan(width, height)
        assert len(plan.parts) == rows * columns + 1, (width, height)
        runs = [piece for piece in plan.pieces if isinstance(piece, Run)]
        assert [run.part for run in runs] == list(range(len(plan.parts)))


@pytest.mark.parametrize("name", SETTINGS)
def test_words_around_tiles_are_those_of_transformers(name: str):
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    processor, other = ours(name), theirs(name)
    for width, height in random_sizes(60, 3000):
        rows, columns = grid_of(other, width, height)
        expected = get_image_prompt_string(
            rows, columns, processor.side**2, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        pieces = processor.plan(width, height).pieces
        found = "".join("<image>" * p.count if isinstance(p, Run) else p for p in pieces)
        assert found == expected


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_pixels_are_those_of_transformers_to_the_bit(name: str, splits: bool):
    processor, other = ours(name, splits=splits), theirs(name, splits=splits)
    edge, tile, patch, merge = SETTINGS[name]
    sizes = [(edge // 3, edge // 5), (tile, tile), (7, 50), (edge + 40, edge // 2 + 1)]
    rng = np.random.default_rng(1)
    for width, height in sizes:
        levels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
        image = Image.fromarray(levels)
        expected = other(image, return_tensors="np")["pixel_values"][0]  # [parts, C, H, W]
        parts = processor.prepare(image)
        assert len(parts) == len(expected) == len(processor.plan(width, height).parts)
        used = tile // patch * patch
        for pixels, values in zip(parts, expected, strict=True):
            found = processor.patches(pixels, processor.plan(width, height).parts[0])
            whole = as_image(found, tile // patch // merge, merge, patch)
            assert np.array_equal(whole, values[:, :used, :used])


def as_image(patches: np.ndarray, side: int, merge: int, patch: int) -> np.ndarray:
    """[C, H, W] of patches in the order of a tower."""
    ordered = patches.reshape(side, side, merge, merge, 3, patch, patch)
    return ordered.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, side * merge * patch, -1)
