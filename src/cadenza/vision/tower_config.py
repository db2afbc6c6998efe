"""`VisionConfig`: everything that the arithmetic of a model that sees depends on, besides its text.

Invariant: an instance is complete; what a file leaves out was filled in when it was read.
"""

from dataclasses import dataclass
from typing import Literal

from cadenza.vision.processor import ImageProcessor

Reach = Literal["all", "windowed"]
"""Layers in which the tokens of an image attend to all of that image: all, or those with a window,
within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The encoder of images and the projector behind it.

    Args:
        hidden_size: width E of the tower's stream.
        intermediate_size: of its MLPs.
        patch_values: values of a patch.
        norm_eps: the constant of its norms.
        num_deepstack: layers whose output is added to the stream of the text model's first layers.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_values: int
    norm_eps: float
    num_deepstack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """How a model sees.

    Args:
        image_token_id: that of placeholders, which no model may generate.
        fill_token_id: within the vocabulary; it stands for placeholders wherever a table is read by
            token.
        reach: None: the tokens of an image attend to earlier ones alone, as text does.
    """

    tower: TowerConfig
    processor: ImageProcessor
    image_token_id: int
    fill_token_id: int
    reach: Reach | None = None

    @property
    def num_parts(self) -> int:
        """Rows of the text model's width that each image token has: the first takes the place of an
        embedding, the others are added behind the first layers."""
        return 1 + self.tower.num_deepstack
