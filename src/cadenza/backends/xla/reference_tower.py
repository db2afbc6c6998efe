"""`ReferenceTower`: an independent, simple implementation of image towers, in numpy's float64: one
image part at once, a whole softmax, no op table. `cadenza verify` compares the engine with it; they
share only the loading of the checkpoint and the processor's patches. Legend: N patches in the
processor's order · E width · H heads · D head size · M tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.request import Attachment
from cadenza.vision.processor import ImagePart
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    TowerActivation,
    TowerNorm,
    TowerRope,
    VisionConfig,
)
from cadenza.weights.weights import Weights

Floats = npt.NDArray[np.float64]

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")

_ERF = np.vectorize(math.erf, otypes=[np.float64])
NUM_AXES = 3


def _tanh_gelu(x: Floats) -> Floats:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS: Mapping[TowerActivation, Callable[[Floats], Floats]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + _ERF(x / math.sqrt(2.0))),
    "gelu_tanh": _tanh_gelu,
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}


@dataclass(frozen=True, slots=True)
class ReferenceTower:
    """The tower and the projectors of a model that sees."""

    vision: VisionConfig
    weights: Weights

    def embed(self, part: ImagePart, pixels: bytes) -> npt.NDArray[np.float32]:
        """The rows [M, parts E'] of an image part's tokens, in order."""
        tower = self.vision.tower
        places = _places(part, tower.merge)
        patches = self.vision.processor.patches(pixels, part).astype(np.float64)
        if tower.has_patch_norms:
            patches = self._norm(tower.norm, tower.names.patch_norm, patches, tower.norm_eps)
        x = self._affine(tower.names.patch, patches)
        if tower.has_patch_norms:
            x = self._norm(tower.norm, tower.names.product_norm, x, tower.norm_eps)
        if tower.table is not None:
            x = x + self._positions(tower.table, places, part)
        if tower.has_pre_norm:
            x = self._norm(tower.norm, tower.names.pre_norm, x, tower.norm_eps)
        parts: list[Floats] = []
        for index in range(tower.num_layers):
            x = self._layer(index, x, places)
            if index in tower.deepstack_layers and tower.deepstack is not None:
                number = tower.deepstack_layers.index(index)
                parts.append(self._project(tower.deepstack, number, x))
        if tower.has_post_norm:
            x = self._norm(tower.norm, tower.names.post_norm, x, tower.norm_eps)
        main = self._project(tower.projector, 0, x)
        return np.concatenate([main, *parts], axis=1).astype(np.float32)

    def _layer(self, index: int, x: Floats, places: npt.NDArray[np.int64]) -> Floats:
        tower, names = self.vision.tower, self.vision.tower.names
        prefix = f"{names.layers}.{index}."
        normed = self._norm(tower.norm, prefix + names.norm1, x, tower.norm_eps)
        mixed = self._affine(prefix + names.out, self._attention(index, normed, places))
        if tower.has_post_norms:
            mixed = self._norm(tower.norm, prefix + names.post_norm1, mixed, tower.norm_eps)
        x = x + mixed
        normed = self._norm(tower.norm, prefix + names.norm2, x, tower.norm_eps)
        activate = _ACTIVATIONS[tower.activation]
        up = self._affine(prefix + names.up, normed)
        if tower.is_gated:
            inner = activate(self._affine(prefix + names.gate, normed)) * up
        else:
            inner = activate(up)
        out = self._affine(prefix + names.down, inner)
        if tower.has_post_norms:
            out = self._norm(tower.norm, prefix + names.post_norm2, out, tower.norm_eps)
        return x + out

    def _attention(self, index: int, x: Floats, places: npt.NDArray[np.int64]) -> Floats:
        tower, names = self.vision.tower, self.vision.tower.names
        prefix = f"{names.layers}.{index}."
        if names.qkv is not None:
            parts = np.split(self._affine(prefix + names.qkv, x), 3, axis=1)
        else:
            own = names.query, names.key, names.value
            parts = [self._affine(prefix + each, x) for each in own]
        query, key, value = (each.reshape(len(x), tower.num_heads, -1) for each in parts)
        if tower.has_head_norms:
            query = self._rms(query, tower.norm_eps) * self._tensor(
                f"{prefix}{names.query_norm}.weight"
            )
            key = self._rms(key, tower.norm_eps) * self._tensor(f"{prefix}{names.key_norm}.weight")
        if tower.norms_values:
            value = self._rms(value, tower.norm_eps)
        if tower.rope is not None:
            query, key = (_turned(each, tower.rope, places) for each in (query, key))
        scores = np.einsum("qhd,khd->hqk", query, key) * tower.scale
        windows = tower.windows
        if windows is not None and index not in windows.full_layers:
            own = places // (windows.side * tower.merge)
            is_seen = (own[:, None] == own[None, :]).all(axis=-1)
            scores = np.where(is_seen[None], scores, -np.inf)
        chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances = chances / chances.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", chances, value).reshape(len(x), -1)

    def _project(self, config: ProjectorConfig, index: int, x: Floats) -> Floats:
        groups = x.reshape(len(x) // config.side**2, config.side**2, -1)

        def normed(rows: Floats) -> Floats:
            if config.norm is None:
                return rows
            name = None if config.norm_name is None else config.norm_name.format(index=index)
            adds = 1.0 if config.norm_adds_one else 0.0
            return self._norm(config.norm, name, rows, config.norm_eps, adds)

        if not config.norm_is_behind:
            groups = normed(groups)
        if config.reduction == "average":
            joined = groups.mean(axis=1) * self.vision.tower.output_scale
            if self.vision.tower.standardizes:
                names = self.vision.tower.names
                joined = (joined - self._tensor(names.std_bias)) * self._tensor(names.std_scale)
        else:
            ordered = groups.swapaxes(1, 2) if config.joins_channels_first else groups
            joined = ordered.reshape(len(groups), -1)
        y = normed(joined) if config.norm_is_behind else joined
        for linear in config.linears:
            name, is_last = linear.name.format(index=index), linear is config.linears[-1]
            is_transposed = config.is_transposed and is_last
            y = y @ self._tensor(f"{name}.weight") if is_transposed else self._affine(name, y)
            if linear.activation is not None:
                y = _ACTIVATIONS[linear.activation](y)
        return y

    def _positions(
        self, table: PatchTable, places: npt.NDArray[np.int64], part: ImagePart
    ) -> Floats:
        stored = self._tensor(self.vision.tower.names.positions)
        row, column = places[:, 0], places[:, 1]
        if table.rule == "sum":
            of_column, of_row = stored.swapaxes(0, 1) if table.axes_are_inner else stored
            return of_column[column] + of_row[row]
        grid = stored.reshape(table.side, table.side, -1)
        if table.rule == "raster":
            return grid[row, column]
        side = self.vision.tower.merge
        last = table.side - 1
        at_row = row * (last / max(part.rows * side - 1, 1))
        at_column = column * (last / max(part.columns * side - 1, 1))
        total = np.zeros((len(places), grid.shape[-1]))
        for r in (np.floor(at_row).astype(int), np.floor(at_row).astype(int) + 1):
            for c in (np.floor(at_column).astype(int), np.floor(at_column).astype(int) + 1):
                weight = (1.0 - abs(at_row - r)) * (1.0 - abs(at_column - c))
                total += weight[:, None] * grid[np.minimum(r, last), np.minimum(c, last)]
        return total

    def _norm(
        self, kind: TowerNorm, name: str | None, x: Floats, eps: float, adds: float = 0.0
    ) -> Floats:
        weight = 1.0 if name is None else self._tensor(f"{name}.weight") + adds
        if kind == "rms":
            return self._rms(x, eps) * weight
        centred = x - x.mean(axis=-1, keepdims=True)
        bias = 0.0 if name is None else self._tensor(f"{name}.bias")
        return self._rms(centred, eps) * weight + bias

    @staticmethod
    def _rms(x: Floats, eps: float) -> Floats:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)

    def _affine(self, name: str, x: Floats) -> Floats:
        weight = self._tensor(f"{name}.weight")
        bounds = [f"{name.removesuffix('.linear')}.{bound}" for bound in _BOUNDS]
        is_clipped = bounds[0] in self.weights
        if is_clipped:
            x = np.clip(x, self._tensor(bounds[0]), self._tensor(bounds[1]))
        y = x @ weight.reshape(len(weight), -1).T
        if is_clipped:
            y = np.clip(y, self._tensor(bounds[2]), self._tensor(bounds[3]))
        return y + self._tensor(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def _tensor(self, name: str) -> Any:
        return np.asarray(self.weights[name]).astype(np.float64)


def _places(part: ImagePart, side: int) -> npt.NDArray[np.int64]:
    """[N, 2] row and column of each patch: tokens row by row, and so the patches of each."""
    found = [
        (token_row * side + row, token_column * side + column)
        for token_row in range(part.rows)
        for token_column in range(part.columns)
        for row in range(side)
        for column in range(side)
    ]
    return np.array(found)


def _turned(heads: Floats, rope: TowerRope, places: npt.NDArray[np.int64]) -> Floats:
    size = heads.shape[-1]
    row, column = places[:, 0], places[:, 1]
    if rope.alternates:
        steps = rope.theta ** (-2.0 * np.arange(size // 2) / size)
        of_row, of_column = steps[0::2], steps[1::2]
    else:
        of_row = of_column = rope.theta ** (-4.0 * np.arange(size // 4) / size)
    angles = [row[:, None] * of_row, column[:, None] * of_column]
    if rope.columns_first:
        angles.reverse()
    if rope.halves_are_apart:
        halves = np.split(heads, 2, axis=-1)
        turned = [_rotated(half, angle) for half, angle in zip(halves, angles, strict=True)]
        return np.concatenate(turned, axis=-1)
    return _rotated(heads, np.concatenate(angles, axis=1))


def _rotated(heads: Floats, angles: Floats) -> Floats:
    first, second = np.split(heads, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


class SeenImages:
    """The images of one sequence: rows from `ReferenceTower`, rotary positions (M-RoPE) counted up
    token by token, from the definition."""

    def __init__(
        self, tower: ReferenceTower, width: int, attachments: Sequence[Attachment]
    ) -> None:
        self._token_id = tower.vision.image_token_id
        self._fill_token_id = tower.vision.fill_token_id
        self._attachments = attachments
        shape = (-1, tower.vision.num_parts, width)
        rows = [tower.embed(_part_of(each), each.payload).reshape(shape) for each in attachments]
        self._rows = np.concatenate(rows) if rows else np.zeros((0, *shape[1:]), np.float32)
        self._num_taken = 0

    def take(
        self, token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
        """Of a chunk's tokens [C]: the ids that stand for them in tables, which of them have rows,
        and the rows [C, parts, E], zeros for text."""
        is_image = token_ids == self._token_id
        found = np.zeros((len(token_ids), *self._rows.shape[1:]), np.float32)
        stop = self._num_taken + int(is_image.sum())
        found[is_image] = self._rows[self._num_taken : stop]
        self._num_taken = stop
        return np.where(is_image, self._fill_token_id, token_ids), is_image, found

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return positions_of(self._attachments, stop)[start:]


def positions_of(attachments: Sequence[Attachment], stop: int) -> npt.NDArray[np.int32]:
    """Time, row and column of the first tokens of a sequence, counted up: [stop, 3]."""
    found: list[tuple[int, ...]] = []
    following = 0
    for each in attachments:
        num_before = each.start - len(found)
        found += [(following + i,) * NUM_AXES for i in range(num_before)]
        following += num_before
        found += [
            (following, following + row, following + column)
            for row in range(each.rows)
            for column in range(each.columns)
        ]
        following += max(each.rows, each.columns)
    found += [(following + i,) * NUM_AXES for i in range(stop - len(found))]
    return np.array(found[:stop], np.int32)


def _part_of(each: Attachment) -> ImagePart:
    return ImagePart(width=each.width, height=each.height, rows=each.rows, columns=each.columns)
