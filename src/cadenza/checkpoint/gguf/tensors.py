"""The tensors of a GGUF model under the declared names: `map_tensors`.

Owns llama.cpp's tensor names, and which declared tensors a stored one holds: all experts of a
layer, and sometimes q, k and v, are stored as one. Invariant: every declared tensor is a part of
one stored tensor of the expected shape, and no stored tensor is left over.

Shapes: E embed, F MLP, D head dim, X experts.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cadenza.checkpoint.declaration import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    LAYER_PROJ,
    LAYER_PROJ_NORM,
    declare,
    declare_final_norm,
    declare_layer,
    name_some,
)
from cadenza.checkpoint.dtypes import WeightDType
from cadenza.checkpoint.gguf import config as gguf_config
from cadenza.checkpoint.gguf.blocks import ENCODINGS
from cadenza.checkpoint.gguf.config import Architecture
from cadenza.checkpoint.gguf.gemma4 import LAYER_EMBEDDING as LAYER_TABLE
from cadenza.checkpoint.gguf.latents import join_latents, latent_places
from cadenza.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from cadenza.checkpoint.layer_kind import Recurrence, ScanShape
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.stored_tensor import (
    MappedFile,
    StoredScheme,
    StoredTensor,
    StoredWeight,
)
from cadenza.checkpoint.tensor_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertMLPSpec,
    GatedMLPSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    ParallelMLPSpec,
    ScanSpec,
    TensorSpec,
)
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

_DTYPES: dict[str, WeightDType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SETTINGS = frozenset(
    {gguf_config.ROPE_FREQUENCIES, gguf_config.LONG_FACTORS, gguf_config.SHORT_FACTORS}
)
"""Tensors that `read_config` reads."""

_FINAL_NORM = "output_norm.weight"
_FINAL_NORM_OF_LFM2 = "token_embd_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stored tensor and the declared ones that it holds, one behind the other."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorSpec, ...]


def map_tensors(
    config: ModelConfig, architecture: Architecture, files: tuple[GGUFFile, ...]
) -> Weights:
    """The declared tensors as ranges of the files.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or of a type that is not
            supported.
    """
    stored = {name for file in files for name in file.header.tensors}
    places = {place.name: place for place in _places(config, stored)}
    _check_names(places, stored - _unused(config), files[0].mapped.name)
    tensors: dict[str, StoredTensor | StoredWeight] = {}
    for file in files:
        for name, tensor in file.header.tensors.items():
            if name in places:
                parts = _cut(tensor, places[name], config, architecture, file.mapped)
                tensors |= {part.name: part for part in parts}
    if config.latent is not None:
        tensors = join_latents(config.latent, tensors)
    types = sorted({each.stored_type for each in tensors.values() if each.format is not None})
    return Weights(
        files=tuple(file.mapped for file in files),
        tensors=tensors,
        scheme=StoredScheme(name=", ".join(types)) if types else None,
    )


def _places(config: ModelConfig, stored: Container[str]) -> Iterator[_Place]:
    has_other_norm = _FINAL_NORM_OF_LFM2 in stored
    top = {
        EMBEDDING: gguf_config.EMBEDDING,
        declare_final_norm(config).name: _FINAL_NORM_OF_LFM2 if has_other_norm else _FINAL_NORM,
        HEAD: gguf_config.HEAD,
        LAYER_EMBEDDING: LAYER_TABLE,
        LAYER_PROJ: "per_layer_model_proj.weight",
        LAYER_PROJ_NORM: "per_layer_proj_norm.weight",
    }
    for spec in declare(config):
        if spec.name in top:
            yield _Place(name=top[spec.name], shape=spec.shape, parts=(spec,))
    for index in range(config.num_layers):
        layer, prefix = declare_layer(config, index), f"blk.{index}"
        recurrence = config.layer_kinds[index].recurrence
        yield from _layer_places(layer, recurrence, prefix, stored)
        if isinstance(layer.mixer, LatentSpec) and config.latent is not None:
            for each in latent_places(layer.mixer, config.latent, prefix, stored):
                yield _Place(name=each.name, shape=each.shape, parts=(each.part,))
            yield from _linear_places(f"{prefix}.attn_output", (layer.mixer.out,))


def _layer_places(
    layer: LayerSpec, recurrence: Recurrence | None, prefix: str, stored: Container[str]
) -> Iterator[_Place]:
    mixer = layer.mixer
    norms = mixer.norms if isinstance(mixer, AttentionSpec) else None
    q_norm, k_norm = (*(norms or ()), None, None)[:2]
    second = f"{prefix}.post_attention_norm.weight"
    has_other_name = layer.mixer_post_norm is None and second in stored
    own = {
        "attn_norm": layer.mixer_norm,
        "attn_q_norm": q_norm,
        "attn_k_norm": k_norm,
        "attn_sinks": mixer.sinks if isinstance(mixer, AttentionSpec) else None,
        "post_attention_norm": layer.mixer_post_norm,
        "post_attention_norm" if has_other_name else "ffn_norm": layer.mlp_norm,
        "post_ffw_norm": layer.mlp_post_norm,
    }
    for name, spec in own.items():
        if spec is not None:
            yield _Place(name=f"{prefix}.{name}.weight", shape=spec.shape, parts=(spec,))
    match mixer:
        case AttentionSpec():
            yield from _attention_places(mixer, prefix, stored)
        case DeltaSpec():
            yield from _delta_places(mixer, prefix)
        case ConvSpec():
            yield from _conv_places(mixer, prefix)
        case ScanSpec():
            assert isinstance(recurrence, ScanShape), "the layer is a selective scan"
            yield from _scan_places(mixer, recurrence, prefix)
        case LatentSpec():
            pass  # `latent_places`
    if layer.inputs is not None:
        yield from _linear_places(f"{prefix}.inp_gate", (layer.inputs.gate,))
        yield from _linear_places(f"{prefix}.proj", (layer.inputs.out,))
        yield _place(f"{prefix}.post_norm.weight", layer.inputs.post_norm)
    if layer.scale is not None:
        yield _place(f"{prefix}.layer_output_scale.weight", layer.scale)
    mlp = layer.mlp
    if isinstance(mlp, ParallelMLPSpec):
        yield from _parallel_places(mlp, prefix, stored)
    elif isinstance(mlp, GatedMLPSpec):
        yield from _gated_places(mlp, prefix)
    else:
        yield from _expert_places(mlp, prefix, stored)


def _attention_places(
    mixer: AttentionSpec, prefix: str, stored: Container[str]
) -> Iterator[_Place]:
    is_fused = mixer.qkv[0].name.endswith("qkv_proj")
    if f"{prefix}.attn_qkv.weight" in stored or is_fused:
        yield from _linear_places(f"{prefix}.attn_qkv", mixer.qkv)
    else:
        for letter, linear in zip("qkv", mixer.qkv, strict=False):
            yield from _linear_places(f"{prefix}.attn_{letter}", (linear,))
    yield from _linear_places(f"{prefix}.attn_output", (mixer.out,))


def _delta_places(mixer: DeltaSpec, prefix: str) -> Iterator[_Place]:
    """The filter is stored as [M, J]."""
    alpha, beta = mixer.rates
    linears = {
        "attn_qkv": mixer.mixed,
        "attn_gate": mixer.gate,
        "ssm_alpha": alpha,
        "ssm_beta": beta,
        "ssm_out": mixer.out,
    }
    for name, linear in linears.items():
        yield from _linear_places(f"{prefix}.{name}", (linear,))
    stored = {
        "ssm_conv1d.weight": (mixer.conv, _filter_shape(mixer.conv)),
        "ssm_a": (mixer.decay, mixer.decay.shape),
        "ssm_dt.bias": (mixer.decay_bias, mixer.decay_bias.shape),
        "ssm_norm.weight": (mixer.norm, mixer.norm.shape),
    }
    for name, (spec, shape) in stored.items():
        yield _Place(name=f"{prefix}.{name}", shape=shape, parts=(spec,))


def _filter_shape(spec: TensorSpec) -> tuple[int, int]:
    channels, _, taps = spec.shape
    return channels, taps


def _conv_places(mixer: ConvSpec, prefix: str) -> Iterator[_Place]:
    yield from _linear_places(f"{prefix}.shortconv.in_proj", (mixer.mixed,))
    yield from _linear_places(f"{prefix}.shortconv.out_proj", (mixer.out,))
    name, shape = f"{prefix}.shortconv.conv.weight", _filter_shape(mixer.conv)
    yield _Place(name=name, shape=shape, parts=(mixer.conv,))


def _scan_places(mixer: ScanSpec, shape: ScanShape, prefix: str) -> Iterator[_Place]:
    """Values of heads are stored with an axis of 1, and norms as [G, ·]."""
    yield from _linear_places(f"{prefix}.ssm_in", (mixer.mixed,))
    yield from _linear_places(f"{prefix}.ssm_out", (mixer.out,))
    heads, groups = (shape.num_heads, 1), (shape.num_groups, shape.value_width // shape.num_groups)
    stored = {
        "ssm_conv1d.weight": (mixer.conv, _filter_shape(mixer.conv)),
        "ssm_conv1d.bias": (mixer.conv_bias, (shape.num_channels,)),
        "ssm_a": (mixer.decay, heads),
        "ssm_d": (mixer.skip, heads),
        "ssm_dt.bias": (mixer.rate_bias, mixer.rate_bias.shape),
        "ssm_norm.weight": (mixer.norm, groups),
    }
    for name, (spec, own) in stored.items():
        if spec is not None:
            yield _Place(name=f"{prefix}.{name}", shape=own, parts=(spec,))


def _place(name: str, spec: TensorSpec) -> _Place:
    return _Place(name=name, shape=spec.shape, parts=(spec,))


def _parallel_places(mlp: ParallelMLPSpec, prefix: str, stored: Container[str]) -> Iterator[_Place]:
    yield from _gated_places(mlp.dense, prefix)
    yield from _expert_places(mlp.experts, prefix, stored)
    others = {
        "post_ffw_norm_1.weight": mlp.dense_norm,
        "pre_ffw_norm_2.weight": mlp.input_norm,
        "post_ffw_norm_2.weight": mlp.experts_norm,
        "ffn_gate_inp.scale": mlp.router_scale,
        "ffn_down_exps.scale": mlp.expert_scale,
    }
    for name, spec in others.items():
        yield _place(f"{prefix}.{name}", spec)


def _gated_places(mlp: GatedMLPSpec, prefix: str) -> Iterator[_Place]:
    """Fused gates and ups are stored as `ffn_up`."""
    names = ("ffn_gate", "ffn_up") if len(mlp.gate_up) == 2 else ("ffn_up",)
    for name, linear in zip(names, mlp.gate_up, strict=True):
        yield from _linear_places(f"{prefix}.{name}", (linear,))
    yield from _linear_places(f"{prefix}.ffn_down", (mlp.down,))


def _linear_places(name: str, linears: tuple[LinearSpec, ...]) -> Iterator[_Place]:
    """The weight, and the bias if there is one, of linears whose rows follow each other."""
    num_out = sum(linear.num_out for linear in linears)
    weights, *biases = zip(*(linear.tensors() for linear in linears), strict=True)
    yield _Place(name=f"{name}.weight", shape=(num_out, linears[0].num_in), parts=weights)
    for parts in biases:
        yield _Place(name=f"{name}.bias", shape=(num_out,), parts=parts)


def _expert_places(mlp: ExpertMLPSpec, prefix: str, stored: Container[str]) -> Iterator[_Place]:
    """[X, F, E] for gates and ups, or [X, 2 F, E] for both, and [X, E, F] for downs."""
    yield from _linear_places(f"{prefix}.ffn_gate_inp", (mlp.router,))
    if (bias := mlp.choice_bias) is not None:
        yield _Place(name=f"{prefix}.exp_probs_b.bias", shape=bias.shape, parts=(bias,))
    fused = f"{prefix}.ffn_gate_up_exps"
    if f"{fused}.weight" in stored:
        yield from _stacks(fused, [expert.gate_up for expert in mlp.experts])
    else:
        gates = [expert.gate_up[:1] for expert in mlp.experts]
        yield from _stacks(f"{prefix}.ffn_gate_exps", gates)
        yield from _stacks(f"{prefix}.ffn_up_exps", [expert.gate_up[1:] for expert in mlp.experts])
    yield from _stacks(f"{prefix}.ffn_down_exps", [(expert.down,) for expert in mlp.experts])
    if mlp.shared is not None:
        gate, up = mlp.shared.gate_up
        for name, linear in (("gate", gate), ("up", up), ("down", mlp.shared.down)):
            yield from _linear_places(f"{prefix}.ffn_{name}_shexp", (linear,))
    if mlp.shared_gate is not None:
        name = f"{prefix}.ffn_gate_inp_shexp.weight"
        parts = (mlp.shared_gate.weight_spec,)
        yield _Place(name=name, shape=(mlp.shared_gate.num_in,), parts=parts)


def _stacks(name: str, experts: list[tuple[LinearSpec, ...]]) -> Iterator[_Place]:
    """The stacked weights, and the biases if there are any."""
    num_out = sum(linear.num_out for linear in experts[0])
    all_linears = [linear for linears in experts for linear in linears]
    weights, *biases = zip(*(linear.tensors() for linear in all_linears), strict=True)
    shape = (len(experts), num_out)
    yield _Place(name=f"{name}.weight", shape=(*shape, experts[0][0].num_in), parts=weights)
    for parts in biases:
        yield _Place(name=f"{name}.bias", shape=shape, parts=parts)


def _unused(config: ModelConfig) -> set[str]:
    """Keys and values of layers that read an earlier layer's; some files have them."""
    return {
        f"blk.{index}.{name}.weight"
        for index, kind in enumerate(config.layer_kinds)
        if kind.kv_source is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }


def _check_names(places: Mapping[str, _Place], stored: set[str], where: str) -> None:
    missing = [name for name in places if name not in stored]
    mtp_layers = tuple(name.split("nextn.")[0] for name in stored if ".nextn." in name)
    unused = {name for name in stored if name in _SETTINGS or name.startswith(mtp_layers)}
    extra = [name for name in stored if name not in places and name not in unused]
    if missing:
        raise CheckpointError(
            f"{where} lacks {name_some(missing)}, which its metadata require; fetch the file "
            f"again, or convert the model again"
        )
    if extra:
        raise CheckpointError(
            f"{where} contains {name_some(sorted(extra))}, which its metadata do not account for; "
            f"use a file of the model alone"
        )


def _cut(
    tensor: GGUFTensor,
    place: _Place,
    config: ModelConfig,
    architecture: Architecture,
    file: MappedFile,
) -> Iterator[StoredTensor]:
    """Cuts a stored tensor into its parts, which are consecutive rows."""
    _check_shape(tensor, place.shape, file)
    has_pairs = architecture.has_paired_rows
    for part in _parts(tensor, place.parts, file):
        heads = _num_paired_heads(part.name, config) if has_pairs else None
        yield replace(part, num_paired_heads=heads)


def cut_parts(
    tensor: GGUFTensor, parts: Sequence[TensorSpec], file: MappedFile
) -> Iterator[StoredTensor]:
    """A stored tensor as declared ones, which are consecutive rows of it.

    Raises CheckpointError if it has another shape, or a type that is not supported.
    """
    rows = sum(spec.shape[0] for spec in parts)
    _check_shape(tensor, (rows, *parts[0].shape[1:]), file)
    yield from _parts(tensor, parts, file)


def _check_shape(tensor: GGUFTensor, shape: tuple[int, ...], file: MappedFile) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{file.name}: tensor {tensor.name} has shape {list(tensor.shape)}; the metadata "
            f"require {list(shape)}; convert the model again"
        )


def _parts(
    tensor: GGUFTensor, parts: Sequence[TensorSpec], file: MappedFile
) -> Iterator[StoredTensor]:
    kind = tensor.type.name
    if kind not in _DTYPES and kind not in ENCODINGS:
        raise CheckpointError(
            f"{file.name}: tensor {tensor.name} has the type {kind}, which is not supported; "
            f"supported are {', '.join([*_DTYPES, *ENCODINGS])}; use another file of the model, "
            f"such as one in Q4_K_M or Q8_0"
        )
    num_elements = sum(spec.num_elements for spec in parts)
    start = tensor.start
    for spec in parts:
        stop = start + (tensor.stop - tensor.start) * spec.num_elements // num_elements
        yield StoredTensor(
            name=spec.name,
            dtype=_DTYPES.get(kind, "float32"),
            shape=spec.shape,
            data=file.data,
            start=start,
            stop=stop,
            encoding=ENCODINGS.get(kind),
        )
        start = stop


def _num_paired_heads(name: str, config: ModelConfig) -> int | None:
    """The heads of a weight or bias of queries or keys."""
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else None
