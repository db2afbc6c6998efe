"""`ImageEncoder`: the compiled stages of a tower, run over the tower state in quanta. Nothing
compiles after `compile`; what a call computes depends on its part and quanta alone. Legend as in
`stages`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import ImageWork
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, EncoderBlock
from cadenza.backends.xla.vision.stages import BlockInputs, TowerStages, TowerState
from cadenza.backends.xla.vision.tower_weights import TowerSource
from cadenza.batch.step_schema import ImageCall, Int32Array
from cadenza.errors import RunnerError
from cadenza.models.host_math import power, rotations
from cadenza.models.model_config import Activation, ModelConfig
from cadenza.models.tower_spec import Tower
from cadenza.request import Attachment
from cadenza.vision.patches import Floats, Indices, PartOrder, band_of, part_order
from cadenza.vision.processor import CHANNELS, ImagePart
from cadenza.vision.quanta import Blocks, PartSize, Quanta, Quantum, Stage, Workspace
from cadenza.vision.tower_config import PatchTable, TowerConfig, TowerRope, VisionConfig
from cadenza.weights.weights import Weights

# Embeddings [B, E] of patches at places [B, 2] of a part.
TableRows = Callable[[Indices, ImagePart], Floats]
MakeOps = Callable[[DecoderSpec], OpTable]
Compiled = Callable[..., TowerState]
_GATES: dict[str, Activation] = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "silu": "silu"}


@dataclass(frozen=True, slots=True, eq=False)
class PartTables:
    """What a block of an image part takes besides weights, made on the host with the same bits on
    every machine; a method gives what the tower's rows [start, stop) take."""

    vision: VisionConfig
    part: ImagePart
    pixels: bytes
    order: PartOrder
    rotations_of_all: Floats | None  # [N, R]
    positions: npt.NDArray[Any] | None  # [rows, E], the table

    @classmethod
    def of(
        cls, vision: VisionConfig, attachment: Attachment, positions: npt.NDArray[Any] | None
    ) -> "PartTables":
        tower = vision.tower
        part = part_of(attachment)
        order = part_order(tower, part.rows, part.columns)
        rotations = None
        if tower.rope is not None:
            rotations = patch_rotations(tower.rope, tower.head_dim, order.places)
        return cls(vision, part, attachment.payload, order, rotations, positions)

    def patches(self, start: int, stop: int) -> Floats:
        """[B, P], normalised, of the band of the image that has them."""
        side = self.vision.tower.merge
        each = side**2
        tokens = self.order.tokens[start // each : -(-stop // each)]
        height = side * self.vision.tower.patch_size
        first, band = band_of(self.part, tokens, height)
        row_bytes = band.width * CHANNELS * height
        pixels = self.pixels[first * row_bytes : (first + band.rows) * row_bytes]
        found = self.vision.processor.patches(pixels, band)
        of_tokens = found.reshape(band.num_tokens, each, -1)[tokens - first * band.columns]
        flat = of_tokens.reshape(len(tokens) * each, -1)
        return flat[start - start // each * each :][: stop - start]

    def embeddings(self, start: int, stop: int) -> Floats | None:
        """[B, E] of positions; None for a tower without a table."""
        table = self.vision.tower.table
        if table is None or self.positions is None:
            return None
        places = self.order.places[start:stop]
        return table_rows(table, self.positions, places, self._grid)

    def rotations(self, start: int, stop: int) -> Floats | None:
        """[B, R]: cosines, then sines; None for a tower without rope."""
        return None if self.rotations_of_all is None else self.rotations_of_all[start:stop]

    def bounds(self, layer: int, start: int, stop: int) -> Indices | None:
        """[B, 2] of the rows that each attends to; None for all."""
        windows = self.vision.tower.windows
        if windows is None or layer in windows.full_layers or self.order.bounds is None:
            return None
        return self.order.bounds[start:stop]

    @property
    def _grid(self) -> tuple[int, int]:
        side = self.vision.tower.merge
        return self.part.rows * side, self.part.columns * side


def part_of(attachment: Attachment) -> ImagePart:
    return ImagePart(
        width=attachment.width,
        height=attachment.height,
        rows=attachment.rows,
        columns=attachment.columns,
    )


def table_rows(
    table: PatchTable, stored: npt.NDArray[Any], places: Indices, grid: tuple[int, int]
) -> Floats:
    row, column = places[:, 0], places[:, 1]
    match table.rule:
        case "raster":
            assert grid == (table.side, table.side), "checked by the processor"
            return stored[row * table.side + column].astype(np.float32)
        case "sum":
            of_columns = stored[column].astype(np.float32)
            return of_columns + stored[table.side + row].astype(np.float32)
        case "bilinear":
            return _bilinear_rows(table.side, stored, places, grid)


def _bilinear_rows(
    side: int, stored: npt.NDArray[Any], places: Indices, grid: tuple[int, int]
) -> Floats:
    """The corners of both grids are aligned; the arithmetic is float32."""
    taps: list[tuple[Indices, Indices, Floats]] = []
    for axis, count in enumerate(grid):
        scaled = places[:, axis].astype(np.float32) * np.float32(side - 1)
        at = scaled / np.float32(max(count - 1, 1))
        low = at.astype(np.int32)
        high = np.minimum(low + 1, side - 1).astype(np.int32)
        taps.append((low, high, at - low.astype(np.float32)))
    (top, bottom, down), (left, right, across) = taps
    one = np.float32(1.0)
    weighted = (
        (top, left, (one - down) * (one - across)),
        (top, right, (one - down) * across),
        (bottom, left, down * (one - across)),
        (bottom, right, down * across),
    )
    total = np.zeros((len(places), stored.shape[1]), np.float32)
    for row, column, weight in weighted:
        total += stored[row * side + column].astype(np.float32) * weight[:, None]
    return total


def patch_rotations(rope: TowerRope, head_dim: int, places: Indices) -> Floats:
    """[N, D]: cosines, then sines, of each patch's pairs."""
    count = head_dim // 2
    if rope.alternates:
        found = [power(rope.theta, -2.0 * index / head_dim) for index in range(count)]
        by_axis = [found[0::2], found[1::2]]
    else:
        own = [power(rope.theta, -4.0 * index / head_dim) for index in range(count // 2)]
        by_axis = [own, own]
    axes = (1, 0) if rope.columns_first else (0, 1)
    halves = [_axis_rotations(places[:, axis], by_axis[place]) for place, axis in enumerate(axes)]
    parts = [half[part] for part in (0, 1) for half in halves]  # all cosines, then all sines
    return np.concatenate(parts, axis=1)


def _axis_rotations(places: Indices, frequencies: list[float]) -> tuple[Floats, Floats]:
    each = np.arange(int(places.max()) + 1, dtype=np.float64)
    cosines, sines = rotations(each[:, None] * np.array(frequencies)[None, :])
    return cosines.astype(np.float32)[places], sines.astype(np.float32)[places]


def tower_spec(spec: DecoderSpec) -> DecoderSpec:
    """The text model's constants, with the tower's norms, activation and residual sums."""
    vision = spec.model.vision
    assert vision is not None, "the model sees"
    return replace(spec, model=_tower_model(spec.model, vision.tower))


def _tower_model(model: ModelConfig, tower: TowerConfig) -> ModelConfig:
    return replace(
        model,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        rms_norm_eps=tower.norm_eps,
        activation=_GATES.get(tower.activation, "silu"),
        residual_scale=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """`project` has one, or none of a model without layers, `merge` those of
    `TowerConfig.projectors`, `attend` that of layers with and without windows."""

    enter: Compiled
    project: tuple[Compiled, ...]
    attend: dict[bool, Compiled]
    merge: tuple[Compiled, ...]
    keep: Callable[..., Any]


class ImageEncoder:
    """Owns the tower's weights on the device, and the host's tables of the part that is being
    encoded."""

    def __init__(self, spec: DecoderSpec, make_ops: MakeOps) -> None:
        """`spec` is the text model's; `make_ops` constructs an op table."""
        vision = spec.model.vision
        assert vision is not None, "the model sees"
        own = tower_spec(spec)
        self._spec = own
        self._vision = vision
        self._ops = make_ops(own)
        self._blocks = Blocks.of(vision)
        self._stages = TowerStages(self._ops, vision, self._blocks, own.dtype)
        self._weights: Tower | None = None
        self._positions: npt.NDArray[Any] | None = None
        self._programs: StagePrograms | None = None
        self._current: tuple[bytes, PartTables] | None = None

    def load(self, weights: Weights, device: Any) -> None:
        source = TowerSource(WeightSource(self._ops, self._spec, weights), self._vision)
        with self._ops.loading(None), jax.default_device(device):
            loaded = source.load()
        self._weights = jax.device_put(loaded, device)
        self._positions = source.table()

    def compile(self, state: Any, image_rows: Any, sharding: Any) -> None:
        """For an abstract `TowerState` and abstract rows of image slots."""
        compiler = _StageCompiler(self._stages, self._loaded, state, sharding)
        self._programs = compiler.compile(image_rows)

    @property
    def _loaded(self) -> Tower:
        assert self._weights is not None, "the tower was loaded"
        return self._weights

    def work(self, part: Attachment) -> ImageWork:
        products, attention = self._quanta(part).operations()
        return ImageWork(products=products, attention=attention)

    def check(self, calls: Sequence[ImageCall]) -> None:
        """Raises RunnerError for a part that the tower cannot encode."""
        for call in calls:
            part = part_of(call.attachment)
            size, most = self._size(call.attachment), self._vision.max_part_tokens
            if not 0 < size.num_tokens <= most or len(call.slots) != size.num_tokens:
                raise RunnerError(
                    f"an image part of {part.rows} x {part.columns} tokens with {len(call.slots)} "
                    f"slots: it has from 1 to {most} tokens, and a slot for each"
                )
            if len(call.attachment.payload) != part.num_bytes:
                raise RunnerError(
                    f"an image part of {part.width} x {part.height} pixels has "
                    f"{len(call.attachment.payload)} bytes; it needs {part.num_bytes}"
                )

    def run(
        self, state: TowerState, image_rows: Any, calls: Sequence[ImageCall]
    ) -> tuple[TowerState, Any]:
        """Dispatches calls; the state and the rows of image slots [S, parts E'] are donated."""
        for call in calls:
            tables = self._tables(call.attachment)
            for quantum in self._quanta(call.attachment).part(call.start, call.stop):
                if quantum.stage is Stage.KEEP:
                    image_rows = self._keep(state, image_rows, tables, call.slots)
                else:
                    state = self._run(state, quantum, tables)
        return state, image_rows

    def drop_part(self) -> None:
        self._current = None

    def close(self) -> None:
        self._weights = self._programs = self._current = None

    def _keep(
        self, state: TowerState, image_rows: Any, tables: PartTables, slots: Int32Array
    ) -> Any:
        num_tokens = tables.part.num_tokens
        padded = np.full(Workspace.of(self._vision).tokens, -1, np.int32)
        padded[:num_tokens] = slots[tables.order.tokens]
        return self._compiled.keep(state.rows, image_rows, padded, np.int32(num_tokens))

    def _run(self, state: TowerState, quantum: Quantum, tables: PartTables) -> TowerState:
        programs, weights = self._compiled, self._loaded
        num_tokens = tables.part.num_tokens
        match quantum.stage:
            case Stage.ENTER:
                return programs.enter(weights.entry, state, self._given(quantum, tables))
            case Stage.PROJECT:
                layer = weights.layers[quantum.layer]
                (project,) = programs.project
                return project(layer, state, self._given(quantum, tables))
            case Stage.ATTEND:
                layer, given = weights.layers[quantum.layer], self._given(quantum, tables)
                return programs.attend[given.bounds is not None](layer, state, given)
            case _:
                start = quantum.block * self._blocks.tokens
                count = min(self._blocks.tokens, num_tokens - start)
                block = _block(start, count, num_tokens)
                projector = weights.projectors[quantum.layer]
                return programs.merge[quantum.layer](projector, state, BlockInputs(block))

    @property
    def _compiled(self) -> StagePrograms:
        if self._programs is None:
            raise RunnerError("the runner was not warmed up; call warmup() first")
        return self._programs

    def _given(self, quantum: Quantum, tables: PartTables) -> BlockInputs:
        num_patches = len(tables.order.places)
        start = quantum.block * self._blocks.patches
        stop = min(start + self._blocks.patches, num_patches)
        block = _block(start, stop - start, num_patches)

        def padded(rows: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            if rows is None or len(rows) == self._blocks.patches:
                return rows
            missing = self._blocks.patches - len(rows)
            return np.pad(rows, ((0, missing), (0, 0)))

        match quantum.stage:
            case Stage.ENTER:
                patches, positions = tables.patches(start, stop), tables.embeddings(start, stop)
                return BlockInputs(block, patches=padded(patches), positions=padded(positions))
            case Stage.PROJECT:
                return BlockInputs(block, rotations=padded(tables.rotations(start, stop)))
            case _:
                bounds = tables.bounds(quantum.layer, start, stop)
                return BlockInputs(block, bounds=padded(bounds))

    def _tables(self, part: Attachment) -> PartTables:
        if self._current is None or self._current[0] != part.digest:
            tables = PartTables.of(self._vision, part, self._positions)
            self._current = part.digest, tables
        return self._current[1]

    def _quanta(self, part: Attachment) -> Quanta:
        return Quanta(self._vision, self._blocks, self._size(part))

    def _size(self, part: Attachment) -> PartSize:
        return PartSize.of(self._vision, part.rows, part.columns)


def _block(start: int, count: int, num_rows: int) -> EncoderBlock:
    counts: list[Any] = [np.int32(each) for each in (start, count, num_rows)]
    return EncoderBlock(*counts)


@dataclass(frozen=True, slots=True)
class _StageCompiler:
    stages: TowerStages
    weights: Tower
    state: Any
    sharding: Any

    def compile(self, image_rows: Any) -> StagePrograms:
        stages, weights, tower = self.stages, self._abstract(self.weights), self.stages.tower
        words: list[Any] = [self._words() for _ in EncoderBlock._fields]
        size, block = stages.blocks.patches, EncoderBlock(*words)
        enter = BlockInputs(
            block,
            patches=self._floats(size, tower.patch_values),
            positions=None if tower.table is None else self._floats(size, tower.hidden_size),
        )
        rotations = None if tower.rope is None else self._floats(size, tower.head_dim)
        bounds = {False: None, True: self._words(size, 2)}
        kinds = {False} if tower.windows is None else {False, True}
        layers = weights.layers[:1]  # all are alike; a model without a tower has none
        return StagePrograms(
            enter=self._compile(stages.enter, weights.entry, enter),
            project=tuple(
                self._compile(stages.project, layer, BlockInputs(block, rotations=rotations))
                for layer in layers
            ),
            attend={
                kind: self._compile(stages.attend, layer, BlockInputs(block, bounds=bounds[kind]))
                for kind in kinds
                for layer in layers
            },
            merge=tuple(
                self._compile(stages.merge(index), projector, BlockInputs(block))
                for index, projector in enumerate(weights.projectors)
            ),
            keep=self._compile_keep(image_rows),
        )

    def _compile_keep(self, image_rows: Any) -> Callable[..., Any]:
        rows = self.state.rows
        keep = jax.jit(self.stages.keep, donate_argnums=1)
        return keep.lower(rows, image_rows, self._words(len(rows)), self._words()).compile()

    def _compile(self, stage: Callable[..., TowerState], weights: Any, given: Any) -> Compiled:
        return jax.jit(stage, donate_argnums=1).lower(weights, self.state, given).compile()

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding), tree
        )

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.sharding)

    def _floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.sharding)
