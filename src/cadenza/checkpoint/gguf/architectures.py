"""How llama.cpp stores the models of each architecture: `ARCHITECTURES`. Keys that are entries of
config.json are rows; what no single key says is code. A missing key stands for what llama.cpp's
program and the family's own config.json agree on, or what all published models have; else the key
is required."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cadenza.checkpoint.gguf.gemma4 import GEMMA4_KEYS, gemma4_entries
from cadenza.checkpoint.gguf.latents import LATENT_KEYS, read_latents
from cadenza.checkpoint.gguf.settings import OF_FAMILY, Row, Settings
from cadenza.models.families.family import FULL, LINEAR, SLIDING
from cadenza.models.families.hybrid import CONV, MAX_TAPS
from cadenza.models.layer_kind import DeltaShape, LayerKind, ScanShape
from cadenza.models.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ModelConfig,
)
from cadenza.models.rope_config import (
    MAX_POSITIONS,
    RopeConfig,
    Sections,
    YarnRopeScaling,
    format_rope,
)

SECTIONS = "rope.dimension_sections"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_SCALING, _FACTOR, _FINETUNED, _LOG_MULTIPLIER = (
    f"rope.scaling.{name}" for name in ("type", "factor", "finetuned", "yarn_log_multiplier")
)
_TEMPERATURE, _RECURRENT = "attention.temperature_scale", "attention.recurrent_layers"
_SHARED_WIDTH = "expert_shared_feed_forward_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp stores the models of one `general.architecture`."""

    model_type: str
    # the keys that are an entry of config.json, beyond those of all architectures
    rows: tuple[Row, ...] = ()
    stored: tuple[tuple[str, str], ...] = ()  # entries that say whether any layer has a tensor
    # the entries that neither of them can say, of the rope, too; `keys` are those it reads
    read: Callable[[Settings, RopeConfig], dict[str, object]] = lambda _settings, _rope: {}
    keys: frozenset[str] = frozenset()
    gating: int | None = 1  # the `expert_gating_func` of its mixtures; None: any
    # the base of a rope whose file names none; None: files have to. `scaling`, `original`: the type
    # of its scaling, and its original context (None: the trained one), alike
    theta: float | None = 10_000.0
    scaling: str = "linear"
    original: int | None = None
    sections: Sections | None = None  # how positions of three axes share out the pairs of a head
    # the config of what is stored in another way than in the Hugging Face layout
    adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config
    has_layers_without_kv: bool = False  # layers with a recurrence have 0 heads of keys and values
    # a head's rows of q and k are stored in the order 0, D / 2, 1, D / 2 + 1, …, for a rotation of
    # neighbours
    has_paired_rows: bool = False


def _window(settings: Settings) -> dict[str, object]:
    """The sliding window; 0 stands for none, and without a key it is the family's."""
    if not settings.has(_WINDOW):
        return {}
    return {"sliding_window": settings.integer(_WINDOW, 0, MAX_POSITIONS) or None}


def _windows(settings: Settings, full_every: int) -> dict[str, object]:
    window, num_layers = _window(settings), settings.num_layers
    if settings.is_array(_PATTERN):
        are_sliding = settings.flags_of_layers(_PATTERN, num_layers)
    else:
        interval = settings.integer(_PATTERN, 1, MAX_LAYERS, full_every)
        are_sliding = [(index + 1) % interval != 0 for index in range(num_layers)]
    has_window = window.get("sliding_window", True) is not None
    types = [SLIDING if is_sliding and has_window else FULL for is_sliding in are_sliding]
    return {"layer_types": types, **window}


def _types_without_kv(settings: Settings, recurrent: str) -> list[str]:
    """`layer_types`, with `recurrent` for layers without heads of keys."""
    counts = settings.integers_of_layers("attention.head_count_kv") or [1] * settings.num_layers
    return [FULL if count else recurrent for count in counts]


def _read_llama(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    """Llama, Mistral and Mixtral, which the metadata do not distinguish."""
    has_experts = settings.integer("expert_count", 0, MAX_EXPERTS, 0) > 0
    if has_experts:
        settings.require("rope.freq_base")  # Mixtral's own is another than llama.cpp takes
    elif not settings.has(_WINDOW) or not settings.integer(_WINDOW, 0, MAX_POSITIONS):
        return {}
    experts = settings.entries(_EXPERTS) if has_experts else {}
    window = {"sliding_window": None, **_window(settings)}
    no_bias = {"attention_bias": False, "mlp_bias": False}
    return {"model_type": "mixtral" if has_experts else "mistral", **window, **no_bias, **experts}


def _read_mistral3(settings: Settings, rope: RopeConfig) -> dict[str, object]:
    """Mistral Small 3.1 without, and Ministral 3 with YaRN and factors of its queries."""
    scaling = rope.scaling if isinstance(rope.scaling, YarnRopeScaling) else None
    if scaling is not None:
        settings.require(_TEMPERATURE, _LOG_MULTIPLIER)
    beta = settings.number(_TEMPERATURE, 0.0, 1e3, 0.0)
    if not beta:
        return {"model_type": "mistral", "sliding_window": None}
    if scaling is None:
        raise settings.wrong(_SCALING, f"yarn beside {_TEMPERATURE}")
    multiplier = settings.number(_LOG_MULTIPLIER, 0.0, 1e3)
    factor = scaling.attention_factor / (1.0 + 0.1 * multiplier * math.log(scaling.factor))
    scaling = replace(scaling, query_beta=beta, attention_factor=factor)
    return {"rope_parameters": format_rope(replace(rope, scaling=scaling), settings.head_dim)}


def _read_granite(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    if not settings.flag(_FINETUNED, True):
        raise settings.wrong(_FINETUNED, "absent or true: attention without positions is not built")
    return {}


def _read_granite_hybrid(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    settings.require(_FINETUNED)
    width = settings.integer("ssm.inner_size", 1, MAX_WIDTH)
    has_experts = settings.integer("expert_count", 0, MAX_EXPERTS, 0) > 0
    shared = _SHARED_WIDTH if has_experts else "feed_forward_length"
    return {
        "layer_types": _types_without_kv(settings, LINEAR),
        **(settings.entries(_EXPERTS) if has_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": settings.integer(shared, 1, MAX_WIDTH),
        "position_embedding_type": "rope" if settings.flag(_FINETUNED, False) else None,
        "mamba_d_head": width // settings.integer("ssm.time_step_rank", 1, MAX_HEADS),
        "mamba_expand": width // settings.integer("embedding_length", 1, MAX_WIDTH),
    }


def _granite_as_stored(config: ModelConfig) -> ModelConfig:
    """Gate and up are two tensors, and decays are stored as rates."""
    names = replace(config.names, gate_up=None)
    return replace(config, names=names, layer_pattern=_with_rates(config.layer_pattern))


def _with_rates(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    return tuple(
        replace(kind, recurrence=replace(kind.recurrence, has_rates=True))
        if isinstance(kind.recurrence, DeltaShape | ScanShape)
        else kind
        for kind in kinds
    )


def _read_qwen35(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    num_heads = settings.integer("ssm.time_step_rank", 1, MAX_HEADS)
    count = settings.integer("block_count", 1, MAX_LAYERS)
    interval = settings.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    are_recurrent = [(index + 1) % interval != 0 for index in range(count)]
    if settings.is_array(_RECURRENT):
        are_recurrent = settings.flags_of_layers(_RECURRENT, count)
    return {
        "attention_bias": False,
        "layer_types": [LINEAR if each else FULL for each in are_recurrent[: settings.num_layers]],
        "linear_value_head_dim": settings.integer("ssm.inner_size", 1, MAX_WIDTH) // num_heads,
    }


def _qwen35_as_stored(config: ModelConfig) -> ModelConfig:
    """The value heads of one key head lie apart, and decays are stored as rates."""
    kinds = [
        replace(kind, recurrence=replace(kind.recurrence, is_tiled=True))
        if isinstance(kind.recurrence, DeltaShape)
        else kind
        for kind in config.layer_pattern
    ]
    return replace(config, layer_pattern=_with_rates(kinds))


def _read_lfm2(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    epsilon = settings.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0)
    return {
        "layer_types": _types_without_kv(settings, CONV),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": epsilon,
    }


def _read_gpt_oss(settings: Settings, rope: RopeConfig) -> dict[str, object]:
    """Its rope is not truncated, which llama.cpp has no key for; transformers' config says so."""
    parameters: dict[str, object] = {"rope_parameters": None, "rope_theta": rope.theta}
    if isinstance(rope.scaling, YarnRopeScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    if settings.has(_SCALING) or settings.has(_FACTOR):
        parameters = {"rope_parameters": format_rope(rope, settings.head_dim)}
    return {**_windows(settings, full_every=2), **parameters}


def _read_gemma2(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    return {**_windows(settings, full_every=2), **_query_scalar(settings, layers_of_27b=46)}


def _read_gemma3(settings: Settings, rope: RopeConfig) -> dict[str, object]:
    settings.require(_WINDOW)
    local_theta = settings.number("rope.freq_base_swa", 1.0, 1e15, 10_000.0)
    local = replace(rope, theta=local_theta, scaling=None)
    ropes = {
        kind: format_rope(each, settings.head_dim)
        for kind, each in ((FULL, rope), (SLIDING, local))
    }
    scalar = _query_scalar(settings, layers_of_27b=62)
    return {**_windows(settings, full_every=6), **scalar, "rope_parameters": ropes}


def _query_scalar(settings: Settings, layers_of_27b: int) -> dict[str, object]:
    """Gemma's models of 27B scale scores by the width per head, which no key says."""
    is_27b = settings.num_layers == layers_of_27b
    per_head = settings.integer("embedding_length", 1, MAX_WIDTH) // settings.num_heads
    return {"query_pre_attn_scalar": per_head if is_27b else settings.head_dim}


def _seeing(text: Architecture, sections: Sections) -> Architecture:
    """The text model beside a tower, whose images have positions of three axes."""

    def read(settings: Settings, rope: RopeConfig) -> dict[str, object]:
        settings.require(SECTIONS)
        return text.read(settings, rope)

    return replace(text, read=read, keys=text.keys | {"n_deepstack_layers"}, sections=sections)


_EXPERT_KEYS: frozenset[str] = frozenset(
    "expert_count expert_used_count expert_feed_forward_length expert_weights_norm "
    "expert_gating_func".split()
)
_CHOSEN = Row("num_experts_per_tok", "expert_used_count", 1, MAX_EXPERTS)
_EXPERTS = (Row("num_local_experts", "expert_count", 1, MAX_EXPERTS), _CHOSEN)
_EXPERT_WIDTH = Row("moe_intermediate_size", "expert_feed_forward_length", 1, MAX_WIDTH)
_NORM = Row("norm_topk_prob", "expert_weights_norm")
_CAP = Row("final_logit_softcapping", "final_logit_softcapping", 1e-3, 1e6, OF_FAMILY)
_SCORE_CAP = Row("attn_logit_softcapping", "attn_logit_softcapping", 1e-3, 1e6, OF_FAMILY)
_MULTIPLIERS = (
    Row("attention_multiplier", "attention.scale", 1e-6, 1e6),
    Row("embedding_multiplier", "embedding_scale", 1e-6, 1e6),
    Row("residual_multiplier", "residual_scale", 1e-6, 1e6),
    Row("logits_scaling", "logit_scale", 1e-6, 1e6),
)
_DELTA = (
    Row("linear_conv_kernel_dim", "ssm.conv_kernel", 2, MAX_HEADS),
    Row("linear_key_head_dim", "ssm.state_size", 1, MAX_HEAD_DIM),
    Row("linear_num_key_heads", "ssm.group_count", 1, MAX_HEADS),
    Row("linear_num_value_heads", "ssm.time_step_rank", 1, MAX_HEADS),
)
_SCAN = (
    Row("mamba_n_heads", "ssm.time_step_rank", 1, MAX_HEADS),
    Row("mamba_n_groups", "ssm.group_count", 1, MAX_HEADS),
    Row("mamba_d_state", "ssm.state_size", 1, MAX_HEAD_DIM),
    Row("mamba_d_conv", "ssm.conv_kernel", 2, MAX_TAPS),
)
_LATENT = (
    Row("kv_lora_rank", "attention.kv_lora_rank", 1, MAX_WIDTH),
    Row("n_routed_experts", "expert_count", 1, MAX_EXPERTS),
    Row("n_shared_experts", "expert_shared_count", 0, MAX_EXPERTS),
    Row("first_k_dense_replace", "leading_dense_block_count", 0, MAX_LAYERS),
)
_GEMMA4 = (
    Row("intermediate_size", "feed_forward_length", 1, MAX_WIDTH, of_first_layer=True),
    Row("sliding_window", _WINDOW, 1, MAX_POSITIONS),
    Row("num_kv_shared_layers", "attention.shared_kv_layers", 0, MAX_LAYERS),
    Row("hidden_size_per_layer_input", "embedding_length_per_layer_input", 0, MAX_WIDTH, 0),
)
_LFM2_EXPERTS = (
    Row("num_experts", "expert_count", 1, MAX_EXPERTS),
    Row("num_dense_layers", "leading_dense_block_count", 0, MAX_LAYERS),
)
_QWEN35_EXPERTS = (
    Row("intermediate_size", "feed_forward_length", 1, MAX_WIDTH, OF_FAMILY),
    Row("shared_expert_intermediate_size", _SHARED_WIDTH, 1, MAX_WIDTH),
)
_TAPS = (Row("conv_L_cache", "shortconv.l_cache", 2, MAX_TAPS),)
_BIAS = (("attention_bias", "attn_q.bias"),)
_BIASES = (*_BIAS, ("mlp_bias", "ffn_up.bias"))
_SCAN_BIASES = (("mamba_conv_bias", "ssm_conv1d.bias"), ("mamba_proj_bias", "ssm_in.bias"))

_QWEN2 = Architecture(model_type="qwen2", theta=None)
_QWEN3 = replace(_QWEN2, model_type="qwen3", stored=_BIAS)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    rows=(*_EXPERTS, _EXPERT_WIDTH, replace(_NORM, default=True)),
    keys=_EXPERT_KEYS,
)
_QWEN35 = Architecture(
    model_type="qwen3_5_text",
    rows=_DELTA,
    read=_read_qwen35,
    keys=frozenset(
        {"ssm.inner_size", _RECURRENT, "full_attention_interval", "nextn_predict_layers"}
    ),
    theta=None,
    sections="interleaved",
    adapt=_qwen35_as_stored,
)
_LFM2 = Architecture(
    model_type="lfm2", rows=_TAPS, read=_read_lfm2, theta=1e6, has_layers_without_kv=True
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        stored=_BIASES,
        read=_read_llama,
        keys=_EXPERT_KEYS | {_WINDOW},
        has_paired_rows=True,
    ),
    "mistral3": Architecture(
        model_type="ministral3",
        read=_read_mistral3,
        keys=frozenset({_LOG_MULTIPLIER, _TEMPERATURE}),
        theta=None,
        scaling="yarn",
        original=16_384,
        has_paired_rows=True,
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    "qwen2vl": _seeing(_QWEN2, "joined"),
    "qwen3vl": _seeing(_QWEN3, "interleaved"),
    "qwen3vlmoe": _seeing(_QWEN3_MOE, "interleaved"),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        rows=(*_DELTA, *_EXPERTS, _EXPERT_WIDTH, *_QWEN35_EXPERTS),
        keys=_QWEN35.keys | _EXPERT_KEYS,
    ),
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        rows=(*_LATENT, _CHOSEN, _EXPERT_WIDTH, _NORM),
        read=read_latents,
        keys=LATENT_KEYS,
        gating=2,
        theta=None,
        scaling="yarn",
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        stored=_BIASES,
        read=lambda _settings, _rope: {"no_rope_layer_interval": 4},
        theta=None,
        has_paired_rows=True,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        rows=(_CAP, _SCORE_CAP),
        read=_read_gemma2,
        keys=frozenset({_WINDOW, _PATTERN}),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        rows=(_CAP,),
        read=_read_gemma3,
        keys=frozenset({_WINDOW, _PATTERN, "rope.freq_base_swa"}),
        theta=1e6,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        rows=(*_GEMMA4, _CAP),
        read=gemma4_entries,
        keys=_EXPERT_KEYS | GEMMA4_KEYS,
        gating=None,
    ),
    "phi3": Architecture(
        model_type="phi3",
        read=lambda settings, _rope: _window(settings),
        keys=frozenset({_WINDOW}),
        original=4096,
    ),
    "olmo2": Architecture(model_type="olmo2", theta=None),
    "olmoe": Architecture(
        model_type="olmoe", rows=(*_EXPERTS, replace(_NORM, default=False)), keys=_EXPERT_KEYS
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        rows=(*_EXPERTS, replace(_EXPERT_WIDTH, entry="intermediate_size")),
        stored=_BIAS,
        read=_read_gpt_oss,
        keys=_EXPERT_KEYS | {_WINDOW, _PATTERN},
        gating=None,
        theta=150_000.0,
        scaling="yarn",
        original=4096,
    ),
    "granite": Architecture(
        model_type="granite",
        rows=_MULTIPLIERS,
        stored=_BIASES,
        read=_read_granite,
        theta=None,
        has_paired_rows=True,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        rows=(*_MULTIPLIERS, *_SCAN),
        stored=(*_BIAS, *_SCAN_BIASES),
        read=_read_granite_hybrid,
        keys=_EXPERT_KEYS | {_SHARED_WIDTH, "ssm.inner_size"},
        adapt=_granite_as_stored,
        has_layers_without_kv=True,
        has_paired_rows=True,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        rows=(*_TAPS, *_LFM2_EXPERTS, _CHOSEN, _EXPERT_WIDTH),
        stored=(("use_expert_bias", "exp_probs_b.bias"),),
        keys=_EXPERT_KEYS,
        gating=2,
    ),
}
