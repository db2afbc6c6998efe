"""The tensors of an image tower and its projectors as trees: `declare_tower`. The leaves of a
declared tree are specs, named as in the Hugging Face layout (`vision.tower_config.TowerNames`);
those of a loaded one are arrays in the layouts of a backend. Legend: E the tower's width, F its
MLPs', H D all heads, P values of a patch."""

from typing import Generic, NamedTuple, TypeVar

from cadenza.vision.tower_config import (
    ProjectorConfig,
    TowerConfig,
    TowerNorm,
    VisionConfig,
)
from cadenza.weights.tensor_spec import LinearSpec, OperandSpec, PatchSpec, TensorSpec

V = TypeVar("V")  # a vector, or another tensor that is no linear
L = TypeVar("L")  # a linear
Q = TypeVar("Q")  # linears of one input
P = TypeVar("P")  # the linear of a patch's values

# of a linear that is clipped, in the order in which they are declared
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Norm(NamedTuple, Generic[V]):
    """A LayerNorm, or an RMS norm, which has no bias."""

    weight: V  # [E]
    bias: V | None  # [E]


class Standard(NamedTuple, Generic[V]):
    """Subtracts the first, then multiplies by the second."""

    bias: V  # [E]
    factor: V  # [E]


class Entry(NamedTuple, Generic[V, P]):
    """What makes the first stream of patches."""

    patch: P  # [E, P]
    patch_norms: tuple[Norm[V], Norm[V]] | None  # [P] and [E]
    pre_norm: Norm[V] | None


class LayerOutput(NamedTuple, Generic[V, L]):
    """The last linear of attention or MLP, and the norm of what it gives, if there is one."""

    linear: L  # [E, H D] or [E, F]
    norm: Norm[V] | None


class TowerLayer(NamedTuple, Generic[V, L, Q]):
    """Attention, then an MLP; None for what the family does not have."""

    norm1: Norm[V]
    qkv: Q  # [H D, E] each, or one of 3 H D
    head_norms: tuple[V, V] | None  # [D] each
    attention_out: LayerOutput[V, L]
    norm2: Norm[V]
    up: Q  # [F, E]; gate and up of a gated MLP
    mlp_out: LayerOutput[V, L]
    bounds: tuple[V, ...]  # [] each: `BOUNDS` of each linear, in their order


class Projector(NamedTuple, Generic[V, L]):
    """One of `TowerConfig.projectors`; the main one has the norm after the last layer, and what
    standardizes the reduction's output."""

    post_norm: Norm[V] | None
    standard: Standard[V] | None
    norm: Norm[V] | None
    linears: tuple[L, ...]


class Tower(NamedTuple, Generic[V, L, Q, P]):
    """All tensors of a tower and its projectors."""

    entry: Entry[V, P]
    table: V | None
    layers: tuple[TowerLayer[V, L, Q], ...]
    projectors: tuple[Projector[V, L], ...]


NormSpec = Norm[TensorSpec]
TowerLayerSpec = TowerLayer[TensorSpec, LinearSpec, OperandSpec]
ProjectorSpec = Projector[TensorSpec, LinearSpec]
TowerSpec = Tower[TensorSpec, LinearSpec, OperandSpec, PatchSpec]


def declare_tower(vision: VisionConfig) -> TowerSpec:
    tower, names = vision.tower, vision.tower.names
    width = tower.hidden_size
    weight = TensorSpec(
        name=f"{names.patch}.weight", shape=(width, *tower.patch_shape), kind="tower"
    )
    bias = _vector(f"{names.patch}.bias", width, "bias") if tower.has_patch_bias else None
    norms = (
        _norm(tower.norm, names.patch_norm, tower.patch_values),
        _norm(tower.norm, names.product_norm, width),
    )
    return Tower(
        entry=Entry(
            patch=PatchSpec(weight=weight, bias=bias),
            patch_norms=norms if tower.has_patch_norms else None,
            pre_norm=_norm(tower.norm, names.pre_norm, width) if tower.has_pre_norm else None,
        ),
        table=_declare_table(tower),
        layers=tuple(_declare_layer(tower, index) for index in range(tower.num_layers)),
        projectors=tuple(
            _declare_projector(each, tower, index - 1)
            for index, each in enumerate(tower.projectors)
        ),
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
    return TowerLayer(
        bounds=tuple(
            TensorSpec(
                name=f"{prefix}.{name.removesuffix('.linear')}.{bound}", shape=(), kind="bound"
            )
            for name in clipped
            for bound in BOUNDS
        ),
        norm1=_norm(tower.norm, f"{prefix}.{names.norm1}", width),
        qkv=OperandSpec(linears=qkv, are_side_by_side=True),
        head_norms=(
            _vector(f"{prefix}.{names.query_norm}.weight", tower.head_dim, "scale"),
            _vector(f"{prefix}.{names.key_norm}.weight", tower.head_dim, "scale"),
        )
        if tower.has_head_norms
        else None,
        attention_out=LayerOutput(linear(names.out, width, heads, has_bias), post1),
        norm2=_norm(tower.norm, f"{prefix}.{names.norm2}", width),
        up=OperandSpec(
            linears=tuple(linear(name, inner, width, tower.has_mlp_bias) for name in ups)
        ),
        mlp_out=LayerOutput(linear(names.down, width, inner, tower.has_mlp_bias), post2),
    )


def parts_of_qkv(tower: TowerConfig) -> tuple[str, ...]:
    """The names of the linears of queries, keys and values within a layer."""
    names = tower.names
    return (names.query, names.key, names.value) if names.qkv is None else (names.qkv,)


def _declare_projector(config: ProjectorConfig, tower: TowerConfig, index: int) -> ProjectorSpec:
    """`index` is that of a deepstack projector, -1 of the main one."""
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
    norm, post_norm, standard = None, None, None
    if config.norm is not None and config.norm_name is not None:
        norm = _norm(config.norm, config.norm_name.format(index=index), norm_size)
    names, width, is_main = tower.names, tower.hidden_size, index < 0
    if is_main and tower.has_post_norm:
        post_norm = _norm(tower.norm, names.post_norm, width)
    if is_main and tower.standardizes:
        standard = Standard(
            _vector(names.std_bias, width, "bias"), _vector(names.std_scale, width, "scale")
        )
    return Projector(post_norm, standard, norm, tuple(linears))


def _norm(kind: TowerNorm, name: str, size: int) -> NormSpec:
    return Norm(
        weight=_vector(f"{name}.weight", size, "scale"),
        bias=_vector(f"{name}.bias", size, "bias") if kind == "layer" else None,
    )


def _vector(name: str, size: int, kind: str) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), kind="bias" if kind == "bias" else "scale")
