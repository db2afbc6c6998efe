"""The tensors of a GGUF model under the declared names: `map_tensors`. Owns llama.cpp's tensor
names, and which declared tensors a stored one holds: all experts of a layer, and sometimes q, k and
v, are stored as one. Every declared tensor is a part of one stored tensor of the expected shape,
and no stored tensor is left over."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cadenza.checkpoint.gguf import config as gguf_config
from cadenza.checkpoint.gguf.blocks import ENCODINGS
from cadenza.checkpoint.gguf.config import FLOAT_DTYPES, Architecture
from cadenza.checkpoint.gguf.latents import join_latents, latent_parts
from cadenza.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare, name_some
from cadenza.models.layer_kind import ScanShape
from cadenza.models.model_config import ModelConfig
from cadenza.weights.stored_tensor import (
    MappedFile,
    StoredScheme,
    StoredTensor,
    StoredWeight,
)
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

# tensors that `read_config` reads
_SETTINGS = frozenset(
    {gguf_config.ROPE_FREQUENCIES, gguf_config.LONG_FACTORS, gguf_config.SHORT_FACTORS}
)

Shape = tuple[int, ...]
_Reshape = Callable[[Shape, ModelConfig], Shape]


def _grouped(shape: Shape, config: ModelConfig) -> Shape:
    assert isinstance(config.recurrence, ScanShape), "the layer is a selective scan"
    groups = config.recurrence.num_groups
    return groups, shape[0] // groups


def _column(shape: Shape, config: ModelConfig) -> Shape:
    del config
    return *shape, 1


def _row(shape: Shape, config: ModelConfig) -> Shape:
    del config
    return shape[1:]


# Declared names, the stored one, and how its shape differs. Names are without their last part,
# `weight` or `bias`, if they have one; those of a layer without its prefix, those of an expert
# without its block and number. Of several stored names the first one that the file has in any layer
# is meant, else the last
_NAMES: tuple[tuple[str, str, _Reshape | None], ...] = (
    ("model.embed_tokens", "token_embd", None),
    ("model.norm|model.embedding_norm", "token_embd_norm|output_norm", None),
    ("lm_head", "output", None),
    ("model.embed_tokens_per_layer", "per_layer_token_embd", None),
    ("model.per_layer_model_projection", "per_layer_model_proj", None),
    ("model.per_layer_projection_norm", "per_layer_proj_norm", None),
    ("input_layernorm|operator_norm", "attn_norm", None),
    ("post_attention_layernorm", "post_attention_norm|ffn_norm", None),
    ("pre_feedforward_layernorm|ffn_norm", "ffn_norm", None),
    ("post_feedforward_layernorm", "post_ffw_norm", None),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1", None),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2", None),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2", None),
    ("per_layer_input_gate", "inp_gate", None),
    ("per_layer_projection", "proj", None),
    ("post_per_layer_input_norm", "post_norm", None),
    ("layer_scalar", "layer_output_scale.weight", None),
    ("self_attn.q_proj", "attn_q", None),
    ("self_attn.k_proj", "attn_k", None),
    ("self_attn.v_proj", "attn_v", None),
    ("self_attn.qkv_proj|linear_attn.in_proj_qkv", "attn_qkv", None),
    ("self_attn.o_proj|self_attn.out_proj", "attn_output", None),
    ("self_attn.q_norm|self_attn.q_layernorm", "attn_q_norm", None),
    ("self_attn.k_norm|self_attn.k_layernorm", "attn_k_norm", None),
    ("self_attn.sinks", "attn_sinks.weight", None),
    ("self_attn.q_a_proj", "attn_q_a", None),
    ("self_attn.q_b_proj", "attn_q_b", None),
    ("self_attn.q_a_layernorm", "attn_q_a_norm", None),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", None),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm", None),
    ("self_attn.kv_b_proj", "attn_kv_b", None),
    ("linear_attn.in_proj_z", "attn_gate", None),
    ("linear_attn.in_proj_a", "ssm_alpha", None),
    ("linear_attn.in_proj_b", "ssm_beta", None),
    ("linear_attn.A_log", "ssm_a", None),
    ("mamba.A_log", "ssm_a", _column),
    ("mamba.D", "ssm_d", _column),
    ("linear_attn.dt_bias|mamba.dt_bias", "ssm_dt.bias", None),
    ("linear_attn.conv1d|mamba.conv1d", "ssm_conv1d", None),
    ("linear_attn.norm", "ssm_norm", None),
    ("mamba.norm", "ssm_norm", _grouped),
    ("mamba.in_proj", "ssm_in", None),
    ("linear_attn.out_proj|mamba.out_proj", "ssm_out", None),
    ("conv.in_proj", "shortconv.in_proj", None),
    ("conv.conv", "shortconv.conv", None),
    ("conv.out_proj", "shortconv.out_proj", None),
    ("mlp.gate_proj|feed_forward.w1", "ffn_gate", None),
    ("mlp.up_proj|mlp.gate_up_proj|feed_forward.w3", "ffn_up", None),
    ("mlp.down_proj|feed_forward.w2", "ffn_down", None),
    ("shared_mlp.gate_proj", "ffn_gate_shexp|ffn_gate", None),
    ("shared_mlp.up_proj", "ffn_up_shexp|ffn_up", None),
    ("shared_mlp.output_linear", "ffn_down_shexp|ffn_down", None),
    ("mlp.shared_expert.gate_proj|mlp.shared_experts.gate_proj", "ffn_gate_shexp", None),
    ("mlp.shared_expert.up_proj|mlp.shared_experts.up_proj", "ffn_up_shexp", None),
    ("mlp.shared_expert.down_proj|mlp.shared_experts.down_proj", "ffn_down_shexp", None),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp", _row),
    ("mlp.gate|mlp.router|feed_forward.gate|router.proj", "ffn_gate_inp", None),
    ("block_sparse_moe.gate|block_sparse_moe.router.layer", "ffn_gate_inp", None),
    ("router.scale", "ffn_gate_inp.scale", None),
    ("router.per_expert_scale", "ffn_down_exps.scale", None),
    ("mlp.gate.e_score_correction_bias|feed_forward.expert_bias", "exp_probs_b.bias", None),
    ("experts.gate_proj|experts.w1", "ffn_gate_exps", None),
    ("experts.up_proj|experts.w3", "ffn_up_exps", None),
    ("experts.down_proj|experts.w2", "ffn_down_exps", None),
)

_OF = {one: row[1:] for row in _NAMES for one in row[0].split("|")}
# what may be stored as one in a layer, concatenated
_FUSED = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"),
}

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:.+\.)?experts\.\d+\.(.+)")
_PART = re.compile(r"(.+?)(\.weight|\.bias)?")


@dataclass(slots=True, eq=False)
class _Entry:
    """A stored tensor and the declared ones that it holds, concatenated."""

    reshape: _Reshape | None = None
    fixed: Shape | None = None
    num_experts: int | None = None
    parts: list[TensorSpec] = field(default_factory=list[TensorSpec])

    def shape(self, config: ModelConfig) -> Shape:
        """[X, rows of an expert, ·] of experts; a filter [M, 1, J] is stored as [M, J]."""
        first = self.parts[0]
        if self.fixed is not None:
            return self.fixed
        if self.reshape is not None:
            return self.reshape(first.shape, config)
        rows = sum(part.shape[0] for part in self.parts)
        columns = first.shape[2:] if first.kind == "filter" else first.shape[1:]
        stacked = (
            (rows,) if self.num_experts is None else (self.num_experts, rows // self.num_experts)
        )
        return *stacked, *columns


def map_tensors(
    config: ModelConfig, architecture: Architecture, files: tuple[GGUFFile, ...]
) -> Weights:
    """The declared tensors as ranges of the files. Raises CheckpointError if a tensor is missing,
    unexpected, of another shape, or of a type that is not supported."""
    stored = {name for file in files for name in file.header.tensors}
    entries = _entries(config, stored)
    _check_names(entries, stored - _unused(config), files[0].mapped.name)
    tensors: dict[str, StoredTensor | StoredWeight] = {}
    for file in files:
        for name, tensor in file.header.tensors.items():
            if name in entries:
                parts = _cut(tensor, entries[name], config, architecture, file.mapped)
                tensors |= {part.name: part for part in parts}
    if config.latent is not None:
        tensors = join_latents(config.latent, tensors)
    types = sorted({each.stored_type for each in tensors.values() if each.format is not None})
    return Weights(
        files=tuple(file.mapped for file in files),
        tensors=tensors,
        scheme=StoredScheme(name=", ".join(types)) if types else None,
    )


def _entries(config: ModelConfig, stored: set[str]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    in_any_layer = {re.sub(r"^blk\.\d+\.", "", name) for name in stored}
    for spec in declare(config):
        layer = _LAYER.fullmatch(spec.name)
        prefix, name = ("", spec.name) if layer is None else (f"blk.{layer[1]}.", layer[2])
        if name == "self_attn.kv_b_proj.weight" and f"{prefix}attn_k_b.weight" in stored:
            assert config.latent is not None, "it is of attention over latents"
            for own, shape, part in latent_parts(config.latent, spec):
                found[prefix + own] = _Entry(fixed=shape, parts=[part])
            continue
        expert = _EXPERT.fullmatch(name)
        base = _PART.fullmatch(name if expert is None else f"experts.{expert[1]}")
        assert base is not None, "a name is not empty"
        (kinds, reshape), end = _OF[base[1]], base[2] or ""
        own = [f"{kind}{end}" for kind in kinds.split("|")]
        one = next((each for each in own if each in in_any_layer), own[-1])
        if kinds in _FUSED and f"{prefix}{_FUSED[kinds]}.weight" in stored:
            one = f"{_FUSED[kinds]}{end}"
        count = None if expert is None or config.experts is None else config.experts.num_experts
        entry = found.setdefault(prefix + one, _Entry(reshape=reshape, num_experts=count))
        entry.parts.append(spec)
    return found


def _unused(config: ModelConfig) -> set[str]:
    """Keys and values of layers that read an earlier layer's; some files have them."""
    return {
        f"blk.{index}.{name}.weight"
        for index, kind in enumerate(config.layer_kinds)
        if kind.kv_source is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }


def _check_names(entries: Collection[str], stored: set[str], where: str) -> None:
    mtp_layers = tuple(name.split("nextn.")[0] for name in stored if ".nextn." in name)
    unused = {name for name in stored if name in _SETTINGS or name.startswith(mtp_layers)}
    check_found(entries, stored - unused, where, "a file of the model alone")


def lacking(where: str, missing: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{where} lacks {name_some(missing)}, which its metadata require; fetch the file again, or "
        f"convert the model again"
    )


def check_found(declared: Collection[str], stored: Collection[str], where: str, use: str) -> None:
    """Raises CheckpointError if a tensor is missing, or there is another: what to use instead."""
    missing = [name for name in declared if name not in stored]
    if missing:
        raise lacking(where, missing)
    extra = sorted(name for name in stored if name not in declared)
    if extra:
        raise CheckpointError(
            f"{where} contains {name_some(extra)}, which its metadata do not account for; use {use}"
        )


def _cut(
    tensor: GGUFTensor,
    entry: _Entry,
    config: ModelConfig,
    architecture: Architecture,
    file: MappedFile,
) -> Iterator[StoredTensor]:
    """A stored tensor's parts, which are consecutive rows."""
    _check_shape(tensor, entry.shape(config), file)
    has_pairs = architecture.has_paired_rows
    for part in _parts(tensor, entry.parts, file):
        heads = _num_paired_heads(part.name, config) if has_pairs else None
        yield replace(part, num_paired_heads=heads)


def cut_parts(
    tensor: GGUFTensor, parts: Sequence[TensorSpec], file: MappedFile
) -> Iterator[StoredTensor]:
    """A stored tensor as declared ones, which are consecutive rows of it. Raises CheckpointError if
    it has another shape, or a type that is not supported."""
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
    if kind not in FLOAT_DTYPES and kind not in ENCODINGS:
        raise CheckpointError(
            f"{file.name}: tensor {tensor.name} has the type {kind}, which is not supported; "
            f"supported are {', '.join([*FLOAT_DTYPES, *ENCODINGS])}; use another file of the "
            f"model, such as one in Q4_K_M or Q8_0"
        )
    num_elements = sum(spec.num_elements for spec in parts)
    start = tensor.start
    for spec in parts:
        stop = start + (tensor.stop - tensor.start) * spec.num_elements // num_elements
        yield StoredTensor(
            name=spec.name,
            dtype=FLOAT_DTYPES.get(kind, "float32"),
            shape=spec.shape,
            data=file.data,
            start=start,
            stop=stop,
            encoding=ENCODINGS.get(kind),
        )
        start = stop


def _num_paired_heads(name: str, config: ModelConfig) -> int | None:
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else None
