"""The quanta of an image part: which block of which stage each computes, and its operations.

Owns the sizes of blocks and of the memory that they are computed in. Invariant: both follow from
the tower alone, so that an image's quanta follow from its size, and a row's place in its block from
its index.

Legend: N patches of the part, M its tokens, E width, F MLP, H D heads, P values of a patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from cadenza.vision.tower_config import ProjectorConfig, TowerConfig, VisionConfig

MAX_BLOCK = 256
"""Rows of a block of a small tower: enough for products to reach full speed."""

MIN_BLOCK = 64

MAX_OPERATIONS = 6e9
"""Of a quantum of `MIN_BLOCK` rows or more: some ms of two cores."""

MERGED_BLOCK = 64
"""Tokens of a block of a projector."""

_LANES, _SPAN = 16, 512
"""By which op tables round up the size of a head, and the rows of keys."""


class Stage(IntEnum):
    """What a quantum computes."""

    ENTER = 0
    """The first stream of a block: the product of its patches, and their positions."""
    PROJECT = 1
    """Queries, keys and values of a block in a layer."""
    ATTEND = 2
    """The rest of the layer for a block: attention, its output, and the MLP."""
    MERGE = 3
    """Rows of the text model's width, of a block of tokens."""
    KEEP = 4
    """Writes all rows to their image slots."""


@dataclass(frozen=True, slots=True)
class Quantum:
    """Block `block` of a stage, in layer `layer`, or by projector `layer`."""

    stage: Stage
    layer: int
    block: int


@dataclass(frozen=True, slots=True)
class PartSize:
    """Of an image part: its patches and tokens."""

    num_patches: int
    num_tokens: int

    @classmethod
    def of(cls, vision: VisionConfig, rows: int, columns: int) -> "PartSize":
        num_tokens = rows * columns
        return cls(num_tokens * vision.tower.merge**2, num_tokens)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Rows of memory for the largest part, in whole blocks: of patches, and of tokens."""

    patches: int
    tokens: int

    @classmethod
    def of(cls, vision: VisionConfig) -> "Workspace":
        blocks = Blocks.of(vision)
        tokens = -(-vision.max_part_tokens // blocks.tokens) * blocks.tokens
        patches = -(-vision.max_patches // blocks.patches) * blocks.patches
        return cls(max(patches, tokens * vision.tower.merge**2), tokens)

    def num_bytes(self, vision: VisionConfig, text_width: int, item_bytes: int) -> int:
        """Of the stream in float32, and of heads and rows for a text model of `text_width` in
        activations of `item_bytes`."""
        tower = vision.tower
        stream = 4 * self.patches * tower.hidden_size
        padded_heads = tower.num_heads * (tower.head_dim + _LANES)
        heads = 3 * (self.patches + _SPAN) * padded_heads * item_bytes
        return stream + heads + self.tokens * vision.num_parts * text_width * item_bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of the blocks of a tower: of patches, and of tokens."""

    patches: int
    tokens: int = MERGED_BLOCK

    @classmethod
    def of(cls, vision: VisionConfig) -> "Blocks":
        """The largest blocks whose longest quantum is short enough."""
        size = MAX_BLOCK
        while size > MIN_BLOCK and _most_operations(vision, size) > MAX_OPERATIONS:
            size //= 2
        return cls(size)


def quanta_of(vision: VisionConfig, blocks: Blocks, size: PartSize) -> Iterator[Quantum]:
    """All quanta of an image part, in order."""
    tower = vision.tower
    of_patches = range(-(-size.num_patches // blocks.patches))
    of_tokens = range(-(-size.num_tokens // blocks.tokens))
    yield from (Quantum(Stage.ENTER, 0, block) for block in of_patches)
    for layer in range(tower.num_layers):
        yield from (Quantum(Stage.PROJECT, layer, block) for block in of_patches)
        yield from (Quantum(Stage.ATTEND, layer, block) for block in of_patches)
        if layer in tower.deepstack_layers:
            projector = 1 + tower.deepstack_layers.index(layer)
            yield from (Quantum(Stage.MERGE, projector, block) for block in of_tokens)
    yield from (Quantum(Stage.MERGE, 0, block) for block in of_tokens)
    yield Quantum(Stage.KEEP, 0, 0)


def operations_of(
    vision: VisionConfig, blocks: Blocks, size: PartSize
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The operations of each quantum: of products, and of attention."""
    costs = [_operations(vision, blocks, size, each) for each in quanta_of(vision, blocks, size)]
    products, attention = zip(*costs, strict=True)
    return np.array(products, np.float64), np.array(attention, np.float64)


def _operations(
    vision: VisionConfig, blocks: Blocks, size: PartSize, quantum: Quantum
) -> tuple[float, float]:
    """Of products and of attention."""
    tower, width = vision.tower, vision.tower.hidden_size
    first = quantum.block * blocks.patches
    count = min(blocks.patches, size.num_patches - first)
    match quantum.stage:
        case Stage.ENTER:
            return 2.0 * count * tower.patch_values * width, 0.0
        case Stage.PROJECT:
            return 6.0 * count * width * tower.attention_size, 0.0
        case Stage.ATTEND:
            inner = tower.intermediate_size * (3 if tower.is_gated else 2)
            products = 2.0 * count * width * (tower.attention_size + inner)
            num_keys = _num_keys(tower, quantum.layer, size.num_patches)
            return products, 4.0 * count * num_keys * tower.attention_size
        case Stage.MERGE:
            tokens = min(blocks.tokens, size.num_tokens - quantum.block * blocks.tokens)
            return tokens * _merge_operations(tower.projectors[quantum.layer], width), 0.0
        case Stage.KEEP:
            return 0.0, 0.0


def _num_keys(tower: TowerConfig, layer: int, num_patches: int) -> int:
    """The most that a patch attends to."""
    windows = tower.windows
    if windows is None or layer in windows.full_layers:
        return num_patches
    return min(num_patches, (windows.side * tower.merge) ** 2)


def _merge_operations(projector: ProjectorConfig, width: int) -> float:
    """Of one token."""
    total, num_in = 0.0, projector.num_in(width)
    for linear in projector.linears:
        total += 2.0 * num_in * linear.num_out
        num_in = linear.num_out
    return total


def _most_operations(vision: VisionConfig, size: int) -> float:
    """Of the longest quantum of the largest part, in blocks of `size` patches."""
    part = PartSize(vision.max_patches, vision.max_part_tokens)
    tower, blocks = vision.tower, Blocks(size)
    layers = range(max(1, tower.num_layers))
    widest = max(layers, key=lambda layer: _num_keys(tower, layer, part.num_patches))
    stages = (Stage.ENTER, Stage.PROJECT, Stage.ATTEND) if tower.num_layers else (Stage.ENTER,)
    return max(sum(_operations(vision, blocks, part, Quantum(s, widest, 0))) for s in stages)
