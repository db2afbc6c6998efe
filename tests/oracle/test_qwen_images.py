"""Our Qwen processors against transformers' with Pillow: sizes, and pixel values to the bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cadenza.vision.patches import Normalisation
from cadenza.vision.whole_images import QwenImages

pytestmark = pytest.mark.oracle

NUM_SIZES = 10_000
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class Case:
    """The same settings for both."""

    patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def ours(self) -> QwenImages:
        return QwenImages(
            patch_size=self.patch_size,
            merge_size=2,
            temporal_size=2,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            resample="bicubic",
            normalisation=Normalisation(mean=self.mean, std=self.std),
            max_tokens=1 << 20,
        )

    def theirs(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil(
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            patch_size=self.patch_size,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )


CASES = {
    "qwen3-vl": Case(16, 65_536, 16_777_216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "qwen2.5-vl": Case(14, 3136, 12_845_056, CLIP_MEAN, CLIP_STD),
    "small": Case(4, 300, 5000, CLIP_MEAN, CLIP_STD),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def random_sizes() -> np.ndarray:
    """Widths and heights of all magnitudes, with sides within 200 times of each other."""
    sizes = np.exp(np.random.default_rng(5).uniform(0, np.log(6000), (2 * NUM_SIZES, 2)))
    sizes = sizes.astype(np.int64)
    sizes = sizes[sizes.max(axis=1) <= 200 * sizes.min(axis=1)]
    assert len(sizes) > NUM_SIZES
    return sizes[:NUM_SIZES]


def test_sizes_and_counts_are_those_of_transformers(case: Case):
    ours, theirs = case.ours(), case.theirs()
    for width, height in random_sizes().tolist():
        (part,) = ours.plan(width, height).parts
        num_patches = theirs.get_number_of_image_patches(height, width)
        assert part.num_tokens * 4 == num_patches, (width, height)
        assert part.rows * part.columns * ours.unit**2 == part.width * part.height


def test_pixel_values_are_those_of_transformers_to_the_bit(case: Case):
    ours, theirs = case.ours(), case.theirs()
    generator = np.random.default_rng(7)
    for width, height in [(37, 21), (400, 90), (144, 640), (31, 333), (256, 256), (700, 500)]:
        levels = generator.integers(0, 256, (height, width, 3)).astype(np.uint8)
        image = Image.fromarray(levels)
        expected = theirs([image], return_tensors="np")
        (part,), (pixels,) = ours.plan(width, height).parts, ours.prepare(image)
        grid = [1, 2 * part.rows, 2 * part.columns]
        assert expected.image_grid_thw.tolist() == [grid]
        found = ours.patches(pixels, part)
        assert np.array_equal(found.view(np.uint32), expected.pixel_values.view(np.uint32))
