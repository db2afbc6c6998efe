"""Declares name, shape and kind of every tensor of a model: `declare`.

Owns the tensor names of the supported families. Invariant: weights that passed `check_weights` have
every declared tensor in its declared shape, and no tensor that would change the model.

Shapes as in `tensor_spec`; V vocabulary.
"""

import re
from collections.abc import Iterator

from cadenza.checkpoint.dtypes import WEIGHT_DTYPES, as_weight_dtype
from cadenza.checkpoint.layer_kind import (
    ConvShape,
    DeltaShape,
    LatentShape,
    LayerKind,
    ScanShape,
)
from cadenza.checkpoint.model_config import ExpertsConfig, ModelConfig
from cadenza.checkpoint.stored_tensor import StoredTensor
from cadenza.checkpoint.tensor_spec import (
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
    TensorSpec,
    operands_of,
    tensors_of,
)
from cadenza.checkpoint.tower_spec import declare_tower
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
"""In most families: `declare_final_norm` knows the others."""

HEAD = "lm_head.weight"
INPUT_PROJ = "model.input_proj.weight"
HIDDEN_NORM = "model.hidden_layernorm.weight"
EMBEDDING_NORM = "model.token_layernorm.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJ = "model.per_layer_model_projection.weight"
LAYER_PROJ_NORM = "model.per_layer_projection_norm.weight"

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Rotary frequencies stored by old Llama checkpoints; ignored, because the config implies them."""

_KEYS_OR_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
"""Of a layer that reads those of an earlier one they are stored with some models, and unused."""

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
    """The linears that are held together."""
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
    """The weight of a head that is not tied."""
    shape = (config.vocab_size, config.hidden_size)
    return TensorSpec(name=HEAD, shape=shape, kind="head")


def declare_final_norm(config: ModelConfig) -> TensorSpec:
    """The norm before the head."""
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


def declare_layer(config: ModelConfig, index: int) -> LayerSpec:
    """The tensors of one decoder layer."""
    prefix, embed = f"model.layers.{index}", config.hidden_size
    has_pre, has_post = config.has_pre_norms, config.has_post_norms
    names = config.names
    mlp_norm = "pre_feedforward_layernorm" if has_post else names.mlp_norm
    norms = {
        name: _norm(f"{prefix}.{name}.weight", embed)
        for name, is_there in (
            (names.mixer_norm, has_pre),
            (names.mlp_norm, has_pre or has_post),
            ("pre_feedforward_layernorm", has_pre and has_post),
            ("post_feedforward_layernorm", has_post),
        )
        if is_there
    }
    return LayerSpec(
        mixer_norm=norms.get(names.mixer_norm),
        mixer=_declare_mixer(config, config.layer_kinds[index], prefix),
        mixer_post_norm=norms.get(names.mlp_norm) if has_post else None,
        mlp_norm=norms.get(mlp_norm) if has_pre else None,
        mlp=_declare_mlp(config, index),
        mlp_post_norm=norms.get("post_feedforward_layernorm"),
        inputs=_declare_layer_input(config, prefix),
        scale=TensorSpec(name=f"{prefix}.layer_scalar", shape=(1,), kind="scale")
        if config.has_layer_scales
        else None,
    )


def _declare_layer_input(config: ModelConfig, prefix: str) -> LayerInputSpec | None:
    if config.layer_inputs is None:
        return None
    size, embed = config.layer_inputs.size, config.hidden_size
    return LayerInputSpec(
        gate=LinearSpec(name=f"{prefix}.per_layer_input_gate", num_out=size, num_in=embed),
        out=LinearSpec(name=f"{prefix}.per_layer_projection", num_out=embed, num_in=size),
        post_norm=_norm(f"{prefix}.post_per_layer_input_norm.weight", embed),
    )


def _declare_mixer(config: ModelConfig, kind: LayerKind, prefix: str) -> MixerSpec:
    own = f"{prefix}.{config.names.recurrence}"
    match kind.recurrence:
        case DeltaShape() as shape:
            return _declare_delta(config, shape, own)
        case ConvShape() as shape:
            return _declare_conv(config, shape, own)
        case ScanShape() as shape:
            return _declare_scan(config, shape, own)
        case None if kind.latent is not None:
            return _declare_latent(config, kind.latent, f"{prefix}.self_attn")
        case None:
            return _declare_attention(config, kind, f"{prefix}.self_attn")


def _declare_attention(config: ModelConfig, kind: LayerKind, prefix: str) -> AttentionSpec:
    heads, has_gate = config.heads_of(kind), config.has_attention_gate
    query, kv = heads.query_size, heads.kv_size
    parts = [("q_proj", query * (1 + has_gate)), ("k_proj", kv), ("v_proj", kv)]  # [·, E] each
    if kind.kv_source is not None:
        parts = parts[:1]
    elif kind.keys_are_values:
        parts = parts[:2]
    if config.has_fused_tensors:
        parts = [("qkv_proj", query + 2 * kv)]
    return AttentionSpec(
        qkv=OperandSpec(
            linears=_declare_linears(
                prefix, parts, config.hidden_size, has_bias=config.has_qkv_bias
            ),
            are_side_by_side=True,
        ),
        norms=_declare_qk_norms(config, kind, prefix),
        out=LinearSpec(
            name=f"{prefix}.{config.names.attention_out}",
            num_out=config.hidden_size,
            num_in=query,
            has_bias=config.has_attention_out_bias,
        ),
        sinks=TensorSpec(name=f"{prefix}.sinks", shape=(heads.num_heads,), kind="sink")
        if config.has_attention_sinks
        else None,
    )


def _declare_qk_norms(
    config: ModelConfig, kind: LayerKind, prefix: str
) -> tuple[TensorSpec, ...] | None:
    if config.qk_norm is None:
        return None
    heads = config.heads_of(kind)
    is_over_all_heads = config.qk_norm == "all_heads"
    query = heads.query_size if is_over_all_heads else heads.head_dim
    key = heads.kv_size if is_over_all_heads else heads.head_dim
    names = config.names
    norms = (
        _norm(f"{prefix}.{names.query_norm}.weight", query),
        _norm(f"{prefix}.{names.key_norm}.weight", key),
    )
    return norms if kind.kv_source is None else norms[:1]


def _declare_latent(config: ModelConfig, shape: LatentShape, prefix: str) -> LatentSpec:
    embed, rank, has_bias = config.hidden_size, shape.query_rank, config.has_qkv_bias
    width, heads = shape.num_heads * shape.query_size, shape.num_heads

    def linear(name: str, num_out: int, num_in: int, *, has_bias: bool = False) -> LinearSpec:
        return LinearSpec(
            name=f"{prefix}.{name}", num_out=num_out, num_in=num_in, has_bias=has_bias
        )

    query = (linear("q_proj", width, embed),)
    if rank is not None:
        query = (
            linear("q_a_proj", rank, embed, has_bias=has_bias),
            linear("q_b_proj", width, rank),
        )
    latent = linear("kv_a_proj_with_mqa", shape.rank + shape.rotary_size, embed, has_bias=has_bias)
    absorbed = linear("kv_b_proj", heads * (shape.plain_size + shape.value_size), shape.rank)
    return LatentSpec(
        query=query,
        query_norm=None if rank is None else _norm(f"{prefix}.q_a_layernorm.weight", rank),
        latent=latent,
        latent_norm=_norm(f"{prefix}.kv_a_layernorm.weight", shape.rank),
        keys_values=OperandSpec(linears=(absorbed,), is_transposed=True),
        out=linear(
            "o_proj", embed, heads * shape.value_size, has_bias=config.has_attention_out_bias
        ),
    )


def _declare_delta(config: ModelConfig, shape: DeltaShape, prefix: str) -> DeltaSpec:
    embed, heads = config.hidden_size, shape.num_value_heads
    parts = [
        ("in_proj_qkv", shape.num_channels),
        ("in_proj_z", shape.value_width),
        ("in_proj_a", heads),
        ("in_proj_b", heads),
    ]
    mixed, gate, *rates = _declare_linears(prefix, parts, embed, has_bias=False)
    (out,) = _declare_linears(prefix, [("out_proj", embed)], shape.value_width, has_bias=False)
    conv = shape.num_channels, 1, shape.num_inputs
    return DeltaSpec(
        mixed=mixed,
        gate=gate,
        rates=OperandSpec(linears=tuple(rates)),
        conv=TensorSpec(name=f"{prefix}.conv1d.weight", shape=conv, kind="filter"),
        decay=TensorSpec(name=f"{prefix}.A_log", shape=(heads,), kind="decay"),
        decay_bias=TensorSpec(name=f"{prefix}.dt_bias", shape=(heads,), kind="bias"),
        norm=TensorSpec(name=f"{prefix}.norm.weight", shape=(shape.value_size,), kind="scale"),
        out=out,
    )


def _declare_conv(config: ModelConfig, shape: ConvShape, prefix: str) -> ConvSpec:
    embed, width, has_bias = config.hidden_size, shape.num_channels, shape.has_bias
    (mixed,) = _declare_linears(prefix, [("in_proj", 3 * width)], embed, has_bias=has_bias)
    (out,) = _declare_linears(prefix, [("out_proj", embed)], width, has_bias=has_bias)
    filters = width, 1, shape.num_inputs
    return ConvSpec(
        mixed=mixed,
        conv=TensorSpec(name=f"{prefix}.conv.weight", shape=filters, kind="filter"),
        conv_bias=TensorSpec(name=f"{prefix}.conv.bias", shape=(width,), kind="bias")
        if has_bias
        else None,
        out=out,
    )


def _declare_scan(config: ModelConfig, shape: ScanShape, prefix: str) -> ScanSpec:
    embed, heads, width = config.hidden_size, shape.num_heads, shape.value_width
    channels, has_bias = shape.num_channels, shape.has_bias
    rows = width + channels + heads
    (mixed,) = _declare_linears(prefix, [("in_proj", rows)], embed, has_bias=has_bias)
    (out,) = _declare_linears(prefix, [("out_proj", embed)], width, has_bias=has_bias)
    filters = channels, 1, shape.num_inputs
    return ScanSpec(
        mixed=mixed,
        conv=TensorSpec(name=f"{prefix}.conv1d.weight", shape=filters, kind="filter"),
        conv_bias=TensorSpec(name=f"{prefix}.conv1d.bias", shape=(channels,), kind="bias")
        if shape.has_conv_bias
        else None,
        decay=TensorSpec(name=f"{prefix}.A_log", shape=(heads,), kind="decay"),
        rate_bias=TensorSpec(name=f"{prefix}.dt_bias", shape=(heads,), kind="bias"),
        skip=TensorSpec(name=f"{prefix}.D", shape=(heads,), kind="scale"),
        norm=TensorSpec(name=f"{prefix}.norm.weight", shape=(width,), kind="scale"),
        out=out,
    )


def _declare_mlp(config: ModelConfig, index: int) -> MLPSpec:
    layer, kind, experts = f"model.layers.{index}", config.layer_kinds[index], config.experts
    inner = kind.intermediate_size or config.intermediate_size
    if experts is None or not kind.has_experts:
        return _declare_mlp_of(config, f"{layer}.{config.names.mlp}", inner)
    if experts.are_beside_mlp:
        return _declare_parallel_mlp(config, experts, inner, layer)
    return _declare_experts(config, experts, f"{layer}.{experts.names.block}", layer)


def _declare_experts(
    config: ModelConfig, experts: ExpertsConfig, block: str, layer: str
) -> ExpertMLPSpec:
    names, embed = experts.names, config.hidden_size
    shared, shared_gate = f"{layer}.{names.shared}", None
    if experts.has_shared_gate:
        shared_gate = LinearSpec(name=f"{shared}_gate", num_out=1, num_in=embed, kind="router")
    return ExpertMLPSpec(
        router=LinearSpec(
            name=f"{block}.{names.router}",
            num_out=experts.num_experts,
            num_in=embed,
            has_bias=experts.has_bias,
            kind="router",
        ),
        experts=tuple(
            _declare_expert(embed, experts, f"{block}.experts.{expert}")
            for expert in range(experts.num_experts)
        ),
        shared=_declare_mlp_of(config, shared, experts.shared_size)
        if experts.shared_size
        else None,
        shared_gate=shared_gate,
        choice_bias=TensorSpec(
            name=f"{block}.{names.choice_bias}",
            shape=(experts.num_experts,),
            kind="bias",
        )
        if experts.sigmoid_choice is not None and experts.sigmoid_choice.has_bias
        else None,
    )


def _declare_parallel_mlp(
    config: ModelConfig, experts: ExpertsConfig, inner: int, prefix: str
) -> ParallelMLPSpec:
    embed = config.hidden_size
    return ParallelMLPSpec(
        dense=_declare_mlp_of(config, f"{prefix}.mlp", inner),
        dense_norm=_norm(f"{prefix}.post_feedforward_layernorm_1.weight", embed),
        experts=_declare_experts(config, experts, prefix, prefix),
        input_norm=_norm(f"{prefix}.pre_feedforward_layernorm_2.weight", embed),
        experts_norm=_norm(f"{prefix}.post_feedforward_layernorm_2.weight", embed),
        router_scale=TensorSpec(name=f"{prefix}.router.scale", shape=(embed,), kind="scale"),
        expert_scale=TensorSpec(
            name=f"{prefix}.router.per_expert_scale", shape=(experts.num_experts,), kind="scale"
        ),
    )


def _declare_expert(embed: int, experts: ExpertsConfig, prefix: str) -> GatedMLPSpec:
    inner, names = experts.intermediate_size, experts.names
    parts = [(names.gate, inner), (names.up, inner)]  # [F, E] each
    has_bias = experts.has_bias
    gate_up = _declare_linears(prefix, parts, embed, has_bias=has_bias)
    (down,) = _declare_linears(prefix, [(names.down, embed)], inner, has_bias=has_bias)  # [E, F]
    return GatedMLPSpec(gate_up=OperandSpec(linears=gate_up), down=down)


def _declare_mlp_of(config: ModelConfig, prefix: str, inner: int) -> GatedMLPSpec:
    has_bias, names = config.has_mlp_bias, config.names
    fused = "gate_up_proj" if config.has_fused_tensors else names.gate_up
    parts = [(names.gate, inner), (names.up, inner)] if fused is None else [(fused, 2 * inner)]
    (down,) = _declare_linears(
        prefix, [(names.down, config.hidden_size)], inner, has_bias=has_bias
    )  # [E, F]
    gate_up = _declare_linears(prefix, parts, config.hidden_size, has_bias=has_bias)
    return GatedMLPSpec(gate_up=OperandSpec(linears=gate_up), down=down)


def _declare_linears(
    prefix: str, parts: list[tuple[str, int]], num_in: int, *, has_bias: bool
) -> tuple[LinearSpec, ...]:
    return tuple(
        LinearSpec(name=f"{prefix}.{name}", num_out=num_out, num_in=num_in, has_bias=has_bias)
        for name, num_out in parts
    )


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied head is not counted again."""
    return sum(spec.num_elements for spec in declare(config))


def check_weights(config: ModelConfig, weights: Weights) -> None:
    """Compares the stored tensors with the declaration.

    A tied model may store its head as well, if it equals the embedding. MTP layers may be there.

    Raises:
        CheckpointError: a tensor is missing, not part of the model, or of another shape or type.
    """
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
    """Whether it is no part of the decoder: a tensor of an MTP layer, for example."""
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
    """What the names of tensors of MTP layers begin with."""
    layout, count = config.mtp_layout, config.num_mtp_layers
    if layout is None:
        return ()
    return tuple(
        layout.owned.format(layer=layer, place=config.num_layers + layer) for layer in range(count)
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
    """Whether two stored tensors have the same type and bytes."""
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
    """At most three names, and how many more there are, for a message."""
    listed = ", ".join(name[:120] for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more tensors"
