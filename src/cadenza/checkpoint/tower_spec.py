"""The tensors of an image tower and its projectors as values: `declare_tower`.

Names and shapes are those of the Hugging Face layout (`vision.tower_config.TowerNames`). Invariant:
the tower's part of a model's declaration; `declaration.declare` has it behind the text model's.

Legend: E the tower's width, F its MLPs', H D all heads, P values of a patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.checkpoint.tensor_spec import LinearSpec, OperandSpec, TensorSpec
from cadenza.vision.tower_config import (
    ProjectorConfig,
    TowerConfig,
    TowerNorm,
    VisionConfig,
)

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Of a linear that is clipped, in the order in which they are declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm's weight, and its bias if it has one."""

    weight: TensorSpec
    bias: TensorSpec | None = None

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """The linear of a patch's values: [E, P], or a convolution's [E, channels, height, width]."""

    weight: TensorSpec
    bias: TensorSpec | None

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayerSpec:
    """The tensors of one layer; None for what the family does not have."""

    norm1: NormSpec
    qkv: tuple[LinearSpec, ...]  # [H D, E] each, or one of 3 H D
    head_norms: tuple[TensorSpec, TensorSpec] | None  # [D] each
    out: LinearSpec  # [E, H D]
    post_norm1: NormSpec | None
    norm2: NormSpec
    up: tuple[LinearSpec, ...]  # [F, E]; gate and up of a gated MLP
    down: LinearSpec  # [E, F]
    post_norm2: NormSpec | None
    bounds: tuple[TensorSpec, ...] = ()  # [] each: those of `linears`, in their order

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return *self.qkv, self.out, *self.up, self.down

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        yield from self.norm1.tensors()
        for linear in self.qkv:
            yield from linear.tensors()
        yield from self.head_norms or ()
        yield from self.out.tensors()
        for norm in (self.post_norm1, self.norm2):
            if norm is not None:
                yield from norm.tensors()
        for linear in (*self.up, self.down):
            yield from linear.tensors()
        if self.post_norm2 is not None:
            yield from self.post_norm2.tensors()
        yield from self.bounds

    def operands(self) -> Iterator[OperandSpec]:
        """The linears that are held together."""
        yield OperandSpec(linears=self.qkv, are_side_by_side=True)
        yield OperandSpec(linears=(self.out,))
        yield OperandSpec(linears=self.up)
        yield OperandSpec(linears=(self.down,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """The tensors of one projector, in order of use."""

    norm: NormSpec | None
    linears: tuple[LinearSpec, ...]

    def tensors(self) -> Iterator[TensorSpec]:
        if self.norm is not None:
            yield from self.norm.tensors()
        for linear in self.linears:
            yield from linear.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """All tensors of a tower and its projectors."""

    patch: PatchSpec
    table: TensorSpec | None
    pre_norm: NormSpec | None
    layers: tuple[TowerLayerSpec, ...]
    post_norm: NormSpec | None
    projectors: tuple[ProjectorSpec, ...]
    patch_norms: tuple[NormSpec, NormSpec] | None = None
    standard: tuple[TensorSpec, TensorSpec] | None = None  # [E] each: bias and scale

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        yield from self.patch.tensors()
        if self.table is not None:
            yield self.table
        for norm in (*(self.patch_norms or ()), self.pre_norm, self.post_norm):
            if norm is not None:
                yield from norm.tensors()
        yield from self.standard or ()
        for layer in self.layers:
            yield from layer.tensors()
        for projector in self.projectors:
            yield from projector.tensors()

    def operands(self) -> Iterator[OperandSpec]:
        """The linears that are held together."""
        for layer in self.layers:
            yield from layer.operands()
        for projector in self.projectors:
            for linear in projector.linears:
                yield OperandSpec(linears=(linear,))


def declare_tower(vision: VisionConfig) -> TowerSpec:
    """The tensors of a model's tower."""
    tower, names = vision.tower, vision.tower.names
    width = tower.hidden_size
    return TowerSpec(
        patch=PatchSpec(
            weight=TensorSpec(
                name=f"{names.patch}.weight", shape=(width, *tower.patch_shape), kind="tower"
            ),
            bias=_vector(f"{names.patch}.bias", width, "bias") if tower.has_patch_bias else None,
        ),
        table=_declare_table(tower),
        pre_norm=_norm(tower.norm, names.pre_norm, width) if tower.has_pre_norm else None,
        layers=tuple(_declare_layer(tower, index) for index in range(tower.num_layers)),
        post_norm=_norm(tower.norm, names.post_norm, width) if tower.has_post_norm else None,
        projectors=tuple(
            _declare_projector(each, tower, index - 1)
            for index, each in enumerate(tower.projectors)
        ),
        patch_norms=(
            _norm(tower.norm, names.patch_norm, tower.patch_values),
            _norm(tower.norm, names.product_norm, width),
        )
        if tower.has_patch_norms
        else None,
        standard=(_vector(names.std_bias, width, "bias"), _vector(names.std_scale, width, "scale"))
        if tower.standardizes
        else None,
    )


def _declare_table(tower: TowerConfig) -> TensorSpec | None:
    table = tower.table
    if table is None:
        return None
    shape = (table.num_rows, tower.hidden_size)
    if table.rule == "sum":
        axes = (table.side, 2) if table.axes_are_inner else (2, table.side)
        shape = (*axes, tower.hidden_size)
    return TensorSpec(name=tower.names.positions, shape=shape, kind="positions")


def _declare_layer(tower: TowerConfig, index: int) -> TowerLayerSpec:
    prefix, names, width = f"{tower.names.layers}.{index}", tower.names, tower.hidden_size

    def linear(name: str, num_out: int, num_in: int, has_bias: bool) -> LinearSpec:
        return LinearSpec(
            name=f"{prefix}.{name}", num_out=num_out, num_in=num_in, has_bias=has_bias, kind="tower"
        )

    heads, inner, has_bias = tower.attention_size, tower.intermediate_size, tower.has_attention_bias
    if names.qkv is not None:
        qkv = (linear(names.qkv, 3 * heads, width, has_bias),)
    else:
        qkv = tuple(linear(part, heads, width, has_bias) for part in parts_of_qkv(tower))
    ups = (names.gate, names.up) if tower.is_gated else (names.up,)
    post1, post2 = (
        _norm(tower.norm, f"{prefix}.{name}", width) if tower.has_post_norms else None
        for name in (names.post_norm1, names.post_norm2)
    )
    clipped = [*parts_of_qkv(tower), names.out, *ups, names.down] if tower.clips_linears else []
    return TowerLayerSpec(
        bounds=tuple(
            TensorSpec(
                name=f"{prefix}.{name.removesuffix('.linear')}.{bound}", shape=(), kind="bound"
            )
            for name in clipped
            for bound in BOUNDS
        ),
        norm1=_norm(tower.norm, f"{prefix}.{names.norm1}", width),
        qkv=qkv,
        head_norms=(
            _vector(f"{prefix}.{names.query_norm}.weight", tower.head_dim, "scale"),
            _vector(f"{prefix}.{names.key_norm}.weight", tower.head_dim, "scale"),
        )
        if tower.has_head_norms
        else None,
        out=linear(names.out, width, heads, has_bias),
        post_norm1=post1,
        norm2=_norm(tower.norm, f"{prefix}.{names.norm2}", width),
        up=tuple(linear(name, inner, width, tower.has_mlp_bias) for name in ups),
        down=linear(names.down, width, inner, tower.has_mlp_bias),
        post_norm2=post2,
    )


def parts_of_qkv(tower: TowerConfig) -> tuple[str, ...]:
    """The names of the linears of queries, keys and values within a layer."""
    names = tower.names
    return (names.query, names.key, names.value) if names.qkv is None else (names.qkv,)


def _declare_projector(config: ProjectorConfig, tower: TowerConfig, index: int) -> ProjectorSpec:
    """`index` is that of a deepstack projector."""
    linears: list[LinearSpec] = []
    last = config.linears[-1]
    num_in = config.num_in(tower.hidden_size)
    norm_size = num_in if config.norm_is_behind else tower.hidden_size
    for each in config.linears:
        linears.append(
            LinearSpec(
                name=each.name.format(index=index),
                num_out=num_in if config.is_transposed and each is last else each.num_out,
                num_in=each.num_out if config.is_transposed and each is last else num_in,
                has_bias=each.has_bias,
                kind="tower",
            )
        )
        num_in = each.num_out
    norm = None
    if config.norm is not None and config.norm_name is not None:
        norm = _norm(config.norm, config.norm_name.format(index=index), norm_size)
    return ProjectorSpec(norm=norm, linears=tuple(linears))


def _norm(kind: TowerNorm, name: str, size: int) -> NormSpec:
    return NormSpec(
        weight=_vector(f"{name}.weight", size, "scale"),
        bias=_vector(f"{name}.bias", size, "bias") if kind == "layer" else None,
    )


def _vector(name: str, size: int, kind: str) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), kind="bias" if kind == "bias" else "scale")
