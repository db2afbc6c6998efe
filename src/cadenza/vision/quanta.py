"""The quanta of an image part's encoding: which block of which stage each computes, and its
operations. Sizes of blocks and workspace follow from the tower alone, so that a row's index in its
block follows from its own. Legend: N patches of the part, M its tokens, E width, F MLP, H D heads,
P values of a patch."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cadenza.vision.tower_config import ProjectorConfig, TowerConfig, VisionConfig

MAX_BLOCK = 256  # rows of a block of a small tower, enough for products to reach full speed

MIN_BLOCK = 64

MAX_OPERATIONS = 6e9  # of a quantum of `MIN_BLOCK` rows or more: some ms on two cores

MERGED_BLOCK = 64  # tokens of a block of a projector

_LANES, _SPAN = 16, 512  # op tables round up the head size, and the rows of keys


class Stage(IntEnum):
    """What a quantum computes."""

    ENTER = 0  # the first stream of a block: the product of its patches, and their positions
    PROJECT = 1  # queries, keys and values of a block in a layer
    ATTEND = 2  # the rest of the layer for a block: attention, its output, and the MLP
    MERGE = 3  # rows of the text model's width, from a block of tokens
    KEEP = 4  # writes all rows to their image slots


@dataclass(frozen=True, slots=True)
class Quantum:
    """Block `block` of a stage, in layer `layer`, or by projector `layer`."""

    stage: Stage
    layer: int
    block: int


@dataclass(frozen=True, slots=True)
class PartSize:
    """Patches and tokens of an image part."""

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


@dataclass(frozen=True, slots=True)
class Pass:
    """A stage over all blocks of a part, in layer `layer`, or by projector `layer`."""

    stage: Stage
    layer: int
    num_blocks: int


class Quanta:
    """All quanta of an image part, in order."""

    def __init__(self, vision: VisionConfig, blocks: Blocks, size: PartSize) -> None:
        self._vision, self._blocks, self._size = vision, blocks, size
        self._passes = tuple(_passes(vision, blocks, size))
        self._ends = tuple(accumulate(each.num_blocks for each in self._passes))

    def __len__(self) -> int:
        return self._ends[-1]

    def part(self, start: int, stop: int) -> Iterator[Quantum]:
        for index in range(start, stop):
            place = bisect_right(self._ends, index)
            of, first = self._passes[place], self._ends[place] - self._passes[place].num_blocks
            yield Quantum(of.stage, of.layer, index - first)

    def operations(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of each quantum: those of products, and of attention."""
        rows = [self._rows(each) for each in self._passes]
        costs = [_operations(self._vision, self._size, each) for each in self._passes]
        products = [count * product for count, (product, _) in zip(rows, costs, strict=True)]
        attention = [count * attends for count, (_, attends) in zip(rows, costs, strict=True)]
        return np.concatenate(products), np.concatenate(attention)

    def _rows(self, of: Pass) -> npt.NDArray[np.float64]:
        is_merge = of.stage is Stage.MERGE
        each = self._blocks.tokens if is_merge else self._blocks.patches
        total = self._size.num_tokens if is_merge else self._size.num_patches
        return np.minimum(each, total - each * np.arange(of.num_blocks, dtype=np.float64))


def _passes(vision: VisionConfig, blocks: Blocks, size: PartSize) -> Iterator[Pass]:
    tower = vision.tower
    of_patches = -(-size.num_patches // blocks.patches)
    of_tokens = -(-size.num_tokens // blocks.tokens)
    yield Pass(Stage.ENTER, 0, of_patches)
    for layer in range(tower.num_layers):
        yield Pass(Stage.PROJECT, layer, of_patches)
        yield Pass(Stage.ATTEND, layer, of_patches)
        if layer in tower.deepstack_layers:
            yield Pass(Stage.MERGE, 1 + tower.deepstack_layers.index(layer), of_tokens)
    yield Pass(Stage.MERGE, 0, of_tokens)
    yield Pass(Stage.KEEP, 0, 1)


def _operations(vision: VisionConfig, size: PartSize, of: Pass) -> tuple[float, float]:
    """Of products and of attention, for each row of a pass."""
    tower, width = vision.tower, vision.tower.hidden_size
    match of.stage:
        case Stage.ENTER:
            return 2.0 * tower.patch_values * width, 0.0
        case Stage.PROJECT:
            return 6.0 * width * tower.attention_size, 0.0
        case Stage.ATTEND:
            inner = tower.intermediate_size * (3 if tower.is_gated else 2)
            num_keys = _num_keys(tower, of.layer, size.num_patches)
            products = 2.0 * width * (tower.attention_size + inner)
            return products, 4.0 * num_keys * tower.attention_size
        case Stage.MERGE:
            return _merge_operations(tower.projectors[of.layer], width), 0.0
        case Stage.KEEP:
            return 0.0, 0.0


def _num_keys(tower: TowerConfig, layer: int, num_patches: int) -> int:
    windows = tower.windows
    if windows is None or layer in windows.full_layers:
        return num_patches
    return min(num_patches, (windows.side * tower.merge) ** 2)


def _merge_operations(projector: ProjectorConfig, width: int) -> float:
    total, num_in = 0.0, projector.num_in(width)
    for linear in projector.linears:
        total += 2.0 * num_in * linear.num_out
        num_in = linear.num_out
    return total


def _most_operations(vision: VisionConfig, size: int) -> float:
    """Of the longest quantum of the largest part, in blocks of `size` patches."""
    part = PartSize(vision.max_patches, vision.max_part_tokens)
    tower, count = vision.tower, min(size, vision.max_patches)
    layers = range(max(1, tower.num_layers))
    widest = max(layers, key=lambda layer: _num_keys(tower, layer, part.num_patches))
    stages = (Stage.ENTER, Stage.PROJECT, Stage.ATTEND) if tower.num_layers else (Stage.ENTER,)
    return count * max(sum(_operations(vision, part, Pass(s, widest, 1))) for s in stages)
