"""Declares name, shape and type of every tensor of a model: `declare`. Weights that passed
`check_weights` have every declared tensor in its declared shape, and no tensor that would change
the model. Shapes as in `tensor_spec`; V vocabulary."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cadenza.errors import CheckpointError
from cadenza.models.layer_kind import (
    ConvShape,
    DeltaShape,
    LatentShape,
    LayerKind,
    ScanShape,
)
from cadenza.models.model_config import ExpertsConfig, ModelConfig
from cadenza.models.tower_spec import declare_tower
from cadenza.weights.stored_tensor import StoredTensor
from cadenza.weights.tensor_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertMLPSpec,
    GatedMLPSpec,
    LatentSpec,
    LayerInputSpec,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    MLPSpec,
    OperandSpec,
    ParallelMLPSpec,
    ScanSpec,
    TensorKind,
    TensorSpec,
    operands_of,
    tensors_of,
)
from cadenza.weights.weight_format import WEIGHT_DTYPES, as_weight_dtype
from cadenza.weights.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"  # in most families; `declare_final_norm` knows the others

HEAD = "lm_head.weight"
INPUT_PROJ = "model.input_proj.weight"
HIDDEN_NORM = "model.hidden_layernorm.weight"
EMBEDDING_NORM = "model.token_layernorm.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJ = "model.per_layer_model_projection.weight"
LAYER_PROJ_NORM = "model.per_layer_projection_norm.weight"

# rotary frequencies stored by old Llama checkpoints; the config implies them
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# of a layer that reads those of an earlier one; stored with some models, and unused
_KEYS_OR_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")

_COMPARED_BYTES = 1 << 22


def declare(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the model in order of use; a tied head is not listed."""
    specs = [declare_embedding(config)]
    if config.reads_hidden:
        specs += [_norm(name, config.hidden_size) for name in (HIDDEN_NORM, EMBEDDING_NORM)]
        specs += tensors_of(declare_input_proj(config))
    if config.layer_inputs is not None:
        specs += declare_layer_inputs(config)
    for index in range(config.num_layers):
        specs += tensors_of(declare_layer(config, index))
    specs.append(declare_final_norm(config))
    if not config.tie_word_embeddings:
        specs.append(declare_head(config))
    if config.vision is not None:
        specs += tensors_of(declare_tower(config.vision))
    return tuple(specs)


def declare_operands(config: ModelConfig) -> Iterator[OperandSpec]:
    if config.layer_inputs is not None:
        yield from operands_of(declare_layer_proj(config))
    for index in range(config.num_layers):
        yield from operands_of(declare_layer(config, index))
    if config.vision is not None:
        yield from operands_of(declare_tower(config.vision))


def declare_embedding(config: ModelConfig) -> TensorSpec:
    """The embedding table, which is also the weight of a tied head."""
    shape = (config.vocab_size, config.hidden_size)
    return TensorSpec(name=EMBEDDING, shape=shape, kind="embedding")


def declare_head(config: ModelConfig) -> TensorSpec:
    shape = (config.vocab_size, config.hidden_size)
    return TensorSpec(name=HEAD, shape=shape, kind="head")


def declare_final_norm(config: ModelConfig) -> TensorSpec:
    return _norm(f"{config.names.final_norm}.weight", config.hidden_size)


def declare_input_proj(config: ModelConfig) -> LinearSpec:
    """The linear of hidden states and embeddings, in the order of the layout: [E, 2 E]."""
    embed = config.hidden_size
    return LinearSpec(name=INPUT_PROJ.removesuffix(".weight"), num_out=embed, num_in=2 * embed)


def declare_layer_inputs(config: ModelConfig) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Of per-layer embeddings: the table [V, layers P], the projection of the stream, its norm."""
    inputs = config.layer_inputs
    assert inputs is not None, "the model has no per-layer embeddings"
    shape = (inputs.vocab_size, config.num_layers * inputs.size)
    return (
        TensorSpec(name=LAYER_EMBEDDING, shape=shape, kind="embedding"),
        declare_layer_proj(config).weight_spec,
        _norm(LAYER_PROJ_NORM, inputs.size),
    )


def declare_layer_proj(config: ModelConfig) -> LinearSpec:
    """The linear of the stream before the first layer: [layers P, E]."""
    inputs = config.layer_inputs
    assert inputs is not None, "the model has no per-layer embeddings"
    return LinearSpec(
        name=LAYER_PROJ.removesuffix(".weight"),
        num_out=config.num_layers * inputs.size,
        num_in=config.hidden_size,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    prefix: str

    def at(self, name: str) -> "_Block":
        return _Block(f"{self.prefix}.{name}")

    def tensor(self, name: str, kind: TensorKind, *shape: int) -> TensorSpec:
        return TensorSpec(name=f"{self.prefix}.{name}", shape=shape, kind=kind)

    def norm(self, name: str, size: int) -> TensorSpec:
        return self.tensor(f"{name}.weight", "norm", size)

    def linear(self, name: str, num_out: int, num_in: int, *, has_bias: bool = False) -> LinearSpec:
        return LinearSpec(
            name=f"{self.prefix}.{name}", num_out=num_out, num_in=num_in, has_bias=has_bias
        )

    def router(self, name: str, num_out: int, num_in: int, *, has_bias: bool) -> LinearSpec:
        return replace(self.linear(name, num_out, num_in, has_bias=has_bias), kind="router")


def declare_layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, names, embed = _Block(f"model.layers.{index}"), config.names, config.hidden_size
    has_pre, has_post = config.has_pre_norms, config.has_post_norms
    mlp_norm = "pre_feedforward_layernorm" if has_post else names.mlp_norm

    def norm(name: str, is_there: bool) -> TensorSpec | None:
        return layer.norm(name, embed) if is_there else None

    return LayerSpec(
        mixer_norm=norm(names.mixer_norm, has_pre),
        mixer=_declare_mixer(config, config.layer_kinds[index], layer),
        mixer_post_norm=norm(names.mlp_norm, has_post),
        mlp_norm=norm(mlp_norm, has_pre),
        mlp=_declare_mlp(config, config.layer_kinds[index], layer),
        mlp_post_norm=norm("post_feedforward_layernorm", has_post),
        inputs=_declare_layer_input(config, layer),
        scale=layer.tensor("layer_scalar", "scale", 1) if config.has_layer_scales else None,
    )


def _declare_layer_input(config: ModelConfig, layer: _Block) -> LayerInputSpec | None:
    if config.layer_inputs is None:
        return None
    size, embed = config.layer_inputs.size, config.hidden_size
    return LayerInputSpec(
        gate=layer.linear("per_layer_input_gate", size, embed),
        out=layer.linear("per_layer_projection", embed, size),
        post_norm=layer.norm("post_per_layer_input_norm", embed),
    )


def _declare_mixer(config: ModelConfig, kind: LayerKind, layer: _Block) -> MixerSpec:
    own, embed = layer.at(config.names.recurrence), config.hidden_size
    match kind.recurrence:
        case DeltaShape() as shape:
            return _declare_delta(embed, shape, own)
        case ConvShape() as shape:
            return _declare_conv(embed, shape, own)
        case ScanShape() as shape:
            return _declare_scan(embed, shape, own)
        case None if kind.latent is not None:
            return _declare_latent(config, kind.latent, layer.at("self_attn"))
        case None:
            return _declare_attention(config, kind, layer.at("self_attn"))


def _declare_attention(config: ModelConfig, kind: LayerKind, own: _Block) -> AttentionSpec:
    heads, embed, has_bias = config.heads_of(kind), config.hidden_size, config.has_qkv_bias
    query, kv = heads.query_size, heads.kv_size
    gated = query * (1 + config.has_attention_gate)
    parts = [("q_proj", gated), ("k_proj", kv), ("v_proj", kv)]  # [·, E] each
    if kind.kv_source is not None:
        parts = parts[:1]
    elif kind.keys_are_values:
        parts = parts[:2]
    if config.has_fused_tensors:
        parts = [("qkv_proj", query + 2 * kv)]
    linears = tuple(own.linear(*part, embed, has_bias=has_bias) for part in parts)
    out, out_has_bias = config.names.attention_out, config.has_attention_out_bias
    return AttentionSpec(
        qkv=OperandSpec(linears=linears, are_side_by_side=True),
        norms=_declare_qk_norms(config, kind, own),
        sinks=own.tensor("sinks", "sink", heads.num_heads) if config.has_attention_sinks else None,
        out=own.linear(out, embed, query, has_bias=out_has_bias),
    )


def _declare_qk_norms(
    config: ModelConfig, kind: LayerKind, own: _Block
) -> tuple[TensorSpec, ...] | None:
    if config.qk_norm is None:
        return None
    heads, names = config.heads_of(kind), config.names
    sizes = heads.query_size, heads.kv_size
    if config.qk_norm == "head":
        sizes = heads.head_dim, heads.head_dim
    norms = own.norm(names.query_norm, sizes[0]), own.norm(names.key_norm, sizes[1])
    return norms if kind.kv_source is None else norms[:1]


def _declare_latent(config: ModelConfig, shape: LatentShape, own: _Block) -> LatentSpec:
    embed, rank, has_bias = config.hidden_size, shape.query_rank, config.has_qkv_bias
    width, heads = shape.num_heads * shape.query_size, shape.num_heads
    query = (own.linear("q_proj", width, embed),)
    if rank is not None:
        down = own.linear("q_a_proj", rank, embed, has_bias=has_bias)
        query = down, own.linear("q_b_proj", width, rank)
    latent = shape.rank + shape.rotary_size
    absorbed = own.linear("kv_b_proj", heads * (shape.plain_size + shape.value_size), shape.rank)
    values, out_has_bias = heads * shape.value_size, config.has_attention_out_bias
    return LatentSpec(
        query=query,
        latent=own.linear("kv_a_proj_with_mqa", latent, embed, has_bias=has_bias),
        query_norm=None if rank is None else own.norm("q_a_layernorm", rank),
        latent_norm=own.norm("kv_a_layernorm", shape.rank),
        keys_values=OperandSpec(linears=(absorbed,), is_transposed=True),
        out=own.linear("o_proj", embed, values, has_bias=out_has_bias),
    )


def _declare_delta(embed: int, shape: DeltaShape, own: _Block) -> DeltaSpec:
    heads = shape.num_value_heads
    rates = own.linear("in_proj_a", heads, embed), own.linear("in_proj_b", heads, embed)
    return DeltaSpec(
        mixed=own.linear("in_proj_qkv", shape.num_channels, embed),
        gate=own.linear("in_proj_z", shape.value_width, embed),
        rates=OperandSpec(linears=rates),
        conv=own.tensor("conv1d.weight", "filter", shape.num_channels, 1, shape.num_inputs),
        decay=own.tensor("A_log", "decay", heads),
        decay_bias=own.tensor("dt_bias", "bias", heads),
        norm=own.tensor("norm.weight", "scale", shape.value_size),
        out=own.linear("out_proj", embed, shape.value_width),
    )


def _declare_conv(embed: int, shape: ConvShape, own: _Block) -> ConvSpec:
    width, has_bias = shape.num_channels, shape.has_bias
    return ConvSpec(
        mixed=own.linear("in_proj", 3 * width, embed, has_bias=has_bias),
        conv=own.tensor("conv.weight", "filter", width, 1, shape.num_inputs),
        conv_bias=own.tensor("conv.bias", "bias", width) if has_bias else None,
        out=own.linear("out_proj", embed, width, has_bias=has_bias),
    )


def _declare_scan(embed: int, shape: ScanShape, own: _Block) -> ScanSpec:
    heads, width, channels = shape.num_heads, shape.value_width, shape.num_channels
    rows, has_bias = width + channels + heads, shape.has_bias
    return ScanSpec(
        mixed=own.linear("in_proj", rows, embed, has_bias=has_bias),
        conv=own.tensor("conv1d.weight", "filter", channels, 1, shape.num_inputs),
        conv_bias=own.tensor("conv1d.bias", "bias", channels) if shape.has_conv_bias else None,
        decay=own.tensor("A_log", "decay", heads),
        rate_bias=own.tensor("dt_bias", "bias", heads),
        skip=own.tensor("D", "scale", heads),
        norm=own.tensor("norm.weight", "scale", width),
        out=own.linear("out_proj", embed, width, has_bias=has_bias),
    )


def _declare_mlp(config: ModelConfig, kind: LayerKind, layer: _Block) -> MLPSpec:
    experts, inner = config.experts, kind.intermediate_size or config.intermediate_size
    if experts is None or not kind.has_experts:
        return _declare_mlp_of(config, layer.at(config.names.mlp), inner)
    if experts.are_beside_mlp:
        return _declare_parallel_mlp(config, experts, inner, layer)
    return _declare_experts(config, experts, layer.at(experts.names.block), layer)


def _declare_experts(
    config: ModelConfig, experts: ExpertsConfig, block: _Block, layer: _Block
) -> ExpertMLPSpec:
    names, embed, count = experts.names, config.hidden_size, experts.num_experts
    choice, shared = experts.sigmoid_choice, None
    if experts.shared_size:
        shared = _declare_mlp_of(config, layer.at(names.shared), experts.shared_size)
    return ExpertMLPSpec(
        router=block.router(names.router, count, embed, has_bias=experts.has_bias),
        choice_bias=block.tensor(names.choice_bias, "bias", count)
        if choice is not None and choice.has_bias
        else None,
        experts=tuple(
            _declare_expert(embed, experts, block.at(f"experts.{expert}"))
            for expert in range(count)
        ),
        shared=shared,
        shared_gate=layer.router(f"{names.shared}_gate", 1, embed, has_bias=False)
        if experts.has_shared_gate
        else None,
    )


def _declare_parallel_mlp(
    config: ModelConfig, experts: ExpertsConfig, inner: int, layer: _Block
) -> ParallelMLPSpec:
    embed = config.hidden_size
    return ParallelMLPSpec(
        dense=_declare_mlp_of(config, layer.at("mlp"), inner),
        experts=_declare_experts(config, experts, layer, layer),
        dense_norm=layer.norm("post_feedforward_layernorm_1", embed),
        input_norm=layer.norm("pre_feedforward_layernorm_2", embed),
        experts_norm=layer.norm("post_feedforward_layernorm_2", embed),
        router_scale=layer.tensor("router.scale", "scale", embed),
        expert_scale=layer.tensor("router.per_expert_scale", "scale", experts.num_experts),
    )


def _declare_expert(embed: int, experts: ExpertsConfig, own: _Block) -> GatedMLPSpec:
    inner, names, has_bias = experts.intermediate_size, experts.names, experts.has_bias
    gate_up = tuple(
        own.linear(name, inner, embed, has_bias=has_bias) for name in (names.gate, names.up)
    )  # [F, E] each
    down = own.linear(names.down, embed, inner, has_bias=has_bias)  # [E, F]
    return GatedMLPSpec(gate_up=OperandSpec(linears=gate_up), down=down)


def _declare_mlp_of(config: ModelConfig, own: _Block, inner: int) -> GatedMLPSpec:
    has_bias, names, embed = config.has_mlp_bias, config.names, config.hidden_size
    fused = "gate_up_proj" if config.has_fused_tensors else names.gate_up
    parts = [(names.gate, inner), (names.up, inner)] if fused is None else [(fused, 2 * inner)]
    gate_up = tuple(own.linear(*part, embed, has_bias=has_bias) for part in parts)
    down = own.linear(names.down, embed, inner, has_bias=has_bias)  # [E, F]
    return GatedMLPSpec(gate_up=OperandSpec(linears=gate_up), down=down)


def count_parameters(config: ModelConfig) -> int:
    """A tied head is not counted again."""
    return sum(spec.num_elements for spec in declare(config))


def check_weights(config: ModelConfig, weights: Weights) -> None:
    """Compares the stored tensors with the declaration. A tied model may store its head as well, if
    it equals the embedding; MTP layers may be there. Raises CheckpointError if a tensor is missing,
    not part of the model, or of another shape or type."""
    specs = {spec.name: spec for spec in declare(config)}
    missing = [name for name in specs if name not in weights]
    if missing:
        raise CheckpointError(
            f"the weights lack {name_some(missing)}, which config.json requires; "
            f"fetch the checkpoint again or correct config.json"
        )
    extra = [name for name in weights if name not in specs and not _is_ignored(config, name)]
    if config.tie_word_embeddings and HEAD in extra:
        _check_tied_head(weights)
        extra.remove(HEAD)
    if extra:
        raise CheckpointError(
            f"the weights contain {name_some(extra)}, which config.json does not account for; "
            f"use a checkpoint whose config.json describes the model completely"
        )
    for spec in specs.values():
        _check_tensor(spec, weights)


def _is_ignored(config: ModelConfig, name: str) -> bool:
    if name.startswith(_mtp_prefixes(config)) or _IGNORED.fullmatch(name) is not None:
        return True
    owner = _KEYS_OR_VALUES.match(name)
    kinds = config.layer_kinds
    return (
        owner is not None
        and int(owner[1]) < len(kinds)
        and kinds[int(owner[1])].kv_source is not None
    )


def _mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    layout, count = config.mtp_layout, config.num_mtp_layers
    if layout is None:
        return ()
    return tuple(
        layout.owned.format(layer=layer, index=config.num_layers + layer) for layer in range(count)
    )


def _check_tensor(spec: TensorSpec, weights: Weights) -> None:
    found = weights.shape(spec.name)
    if found != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(found)}; config.json requires "
            f"{list(spec.shape)}; correct config.json or fetch the checkpoint again"
        )
    stored = weights.tensors[spec.name]
    if isinstance(stored, StoredTensor) and as_weight_dtype(stored.dtype) is None:
        raise CheckpointError(
            f"tensor {spec.name} has the type {stored.dtype}, but by config.json "
            f"it is not quantised; supported are {', '.join(WEIGHT_DTYPES)}; correct config.json "
            f"or fetch the checkpoint again"
        )


def are_equal(weights: Weights, name: str, other: str) -> bool:
    tensors = weights.entry(name), weights.entry(other)
    one, two = (each.raw_bytes for each in tensors)
    if tensors[0].dtype != tensors[1].dtype or len(one) != len(two):
        return False
    starts = range(0, len(one), _COMPARED_BYTES)
    parts = (slice(start, start + _COMPARED_BYTES) for start in starts)
    return all(one[part] == two[part] for part in parts)


def _check_tied_head(weights: Weights) -> None:
    if not are_equal(weights, HEAD, EMBEDDING):
        raise CheckpointError(
            f"config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}; "
            f"set tie_word_embeddings to false or remove the tensor"
        )


def _norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), kind="norm")


def name_some(names: list[str]) -> str:
    """At most three names, and how many more there are."""
    listed = ", ".join(name[:120] for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more tensors"
