"""What a model is: `ModelConfig`, and `parse_model_config`, which reads it from a config.json.

Owns the list of what is supported and the bound of every number in a config. Knows nothing of
files or tensors. Invariant: a `ModelConfig` that was parsed is within bounds and describes the
model completely; whatever would change its arithmetic and is not described here is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.dtypes import FORMAT_OF_NAME, WEIGHT_DTYPES, WeightDType
from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.errors import CheckpointError

Family = Literal["llama", "qwen3"]

ARCHITECTURES: dict[str, Family] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 24
MAX_EOS_IDS = 64

_SUPPORTED = "supported are " + " and ".join(ARCHITECTURES)

_REFUSED_KEYS: dict[str, str] = {
    "auto_map": "code from a checkpoint is never run; use a checkpoint that needs none",
    "quantization_config": "quantised checkpoints are not read; use the unquantised one",
    "compression_config": "compressed checkpoints are not read; use the uncompressed one",
    "attn_logit_softcapping": "soft-capped attention is not supported",
    "final_logit_softcapping": "soft-capped logits are not supported",
    "no_rope_layers": "layers without rotary positions are not supported",
    "num_experts": "mixtures of experts are not supported",
    "num_local_experts": "mixtures of experts are not supported",
}

_DEFAULT_POSITIONS: dict[Family, int] = {"llama": 2048, "qwen3": 32768}
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, blended between.

    The bounds are wavelengths of `original_max_position_embeddings / low_freq_factor` and
    `/ high_freq_factor` tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions over the first `rotary_dim` of a head, halves rotated (not pairs)."""

    theta: float
    rotary_dim: int
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and arithmetic. Activation is SiLU, gated; norms are RMS.

    `has_attention_bias` covers q, k, v and o alike; `has_mlp_bias` gate, up and down.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    has_qk_norm: bool = False
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int
    dtype: WeightDType
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: WeightDType) -> int:
        """Bytes of keys and values that one token needs in all layers."""
        return 2 * self.num_layers * self.kv_size * FORMAT_OF_NAME[dtype].numpy.itemsize


def parse_model_config(values: Mapping[str, object]) -> ModelConfig:
    """Reads the content of a config.json, in the old or the new spelling.

    Raises:
        CheckpointError: something is missing, out of bounds or not supported; the message says
            what was found, what is supported and what to do.
    """
    raw = JsonObject(values, "config.json")
    family = _read_family(raw)
    _refuse_unsupported(raw, family)
    num_heads = raw.whole("num_attention_heads", 1, MAX_HEADS)
    hidden_size = raw.whole("hidden_size", 1, MAX_WIDTH)
    vocab_size = raw.whole("vocab_size", 1, MAX_VOCAB_SIZE)
    head_dim = _read_head_dim(raw, family, hidden_size, num_heads)
    max_positions = raw.whole(
        "max_position_embeddings", 1, MAX_POSITIONS, _DEFAULT_POSITIONS[family]
    )
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=raw.whole("intermediate_size", 1, MAX_WIDTH),
        num_layers=raw.whole("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_read_num_kv_heads(raw, family, num_heads),
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        rope=_read_rope(raw, head_dim, max_positions),
        has_qk_norm=family == "qwen3",
        has_attention_bias=raw.flag("attention_bias", False),
        has_mlp_bias=raw.flag("mlp_bias", False),
        tie_word_embeddings=raw.flag("tie_word_embeddings", False),
        max_position_embeddings=max_positions,
        dtype=_read_dtype(raw),
        eos_token_ids=read_token_ids(raw, "eos_token_id", vocab_size),
        bos_token_id=next(iter(read_token_ids(raw, "bos_token_id", vocab_size)), None),
    )


def format_model_config(config: ModelConfig) -> dict[str, object]:
    """The config.json of `config`; `parse_model_config` reads it back unchanged."""
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    eos = config.eos_token_ids
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _format_rope_scaling(config.rope),
        "attention_bias": config.has_attention_bias,
        "mlp_bias": config.has_mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": config.dtype,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "bos_token_id": config.bos_token_id,
    }


def read_token_ids(raw: JsonObject, key: str, vocab_size: int) -> tuple[int, ...]:
    """A token id or a list of them, as a sorted tuple without repetitions."""
    value = raw.get(key)
    ids = raw.items_of(key) if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS_IDS:
        raise raw.wrong(key, f"at most {MAX_EOS_IDS} token ids")
    found: set[int] = set()
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise raw.wrong(key, "a token id or a list of token ids")
        if not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{raw.where}: {key} names token {shorten(token_id)}, but the vocabulary has "
                f"{vocab_size} tokens; correct one of the two"
            )
        found.add(token_id)
    return tuple(sorted(found))


def _read_family(raw: JsonObject) -> Family:
    architectures = raw.items_of("architectures")
    model_type = raw.text("model_type")
    if len(architectures) > 1:
        raise raw.wrong("architectures", "a list with one name")
    if architectures:
        name = architectures[0]
        family = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if family is None:
            raise CheckpointError(
                f"{raw.where}: architecture {shorten(name)} is not supported; {_SUPPORTED}"
            )
        if model_type not in (None, family):
            raise CheckpointError(
                f"{raw.where}: architecture {name} does not go with model_type "
                f"{shorten(model_type)}; correct one of the two"
            )
        return family
    for family in ARCHITECTURES.values():
        if family == model_type:
            return family
    if model_type is None:
        raise CheckpointError(f"{raw.where} names neither architectures nor model_type; add one")
    raise CheckpointError(
        f"{raw.where}: model_type {shorten(model_type)} is not supported; {_SUPPORTED}"
    )


def _refuse_unsupported(raw: JsonObject, family: Family) -> None:
    for key, reason in _REFUSED_KEYS.items():
        if raw.get(key) not in (None, False, 0, {}, []):
            raise CheckpointError(f"{raw.where}: {key} is set; {reason}")
    activation = raw.text("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise CheckpointError(
            f"{raw.where}: hidden_act {shorten(activation)} is not supported; supported is silu"
        )
    if family == "qwen3" and raw.flag("mlp_bias", False):
        raise CheckpointError(f"{raw.where}: mlp_bias is set, which Qwen3 does not have; remove it")
    if raw.flag("is_encoder_decoder", False):
        raise CheckpointError(f"{raw.where}: encoder-decoder models are not supported")
    _refuse_windows(raw, family)


def _refuse_windows(raw: JsonObject, family: Family) -> None:
    """A window that no layer uses is harmless; one in use changes every long answer."""
    for layer_type in raw.items_of("layer_types"):
        if layer_type != "full_attention":
            raise CheckpointError(
                f"{raw.where}: layer_types names {shorten(layer_type)}; supported is full_attention"
            )
    is_used = raw.flag("use_sliding_window", default=family == "llama")
    if is_used and raw.has("sliding_window"):
        raise CheckpointError(
            f"{raw.where}: sliding_window is {shorten(raw.get('sliding_window'))} and in use; "
            f"supported is full attention in every layer; use another checkpoint"
        )


def _read_head_dim(raw: JsonObject, family: Family, hidden_size: int, num_heads: int) -> int:
    default = _QWEN3_HEAD_DIM
    if family == "llama" and not raw.has("head_dim"):
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{raw.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{num_heads}; add head_dim"
            )
        default = hidden_size // num_heads
    head_dim = raw.whole("head_dim", 2, MAX_HEAD_DIM, default)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise CheckpointError(
            f"{raw.where}: a head has {head_dim} values; rotary positions need an even number "
            f"from 2 to {MAX_HEAD_DIM}; correct head_dim or num_attention_heads"
        )
    return head_dim


def _read_num_kv_heads(raw: JsonObject, family: Family, num_heads: int) -> int:
    default = num_heads if family == "llama" else None
    num_kv_heads = raw.whole("num_key_value_heads", 1, MAX_HEADS, default)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{raw.where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}; correct one of the two"
        )
    return num_kv_heads


def _read_dtype(raw: JsonObject) -> WeightDType:
    """`dtype`, or `torch_dtype` as it was called; float32 where neither is given."""
    key = "dtype" if raw.has("dtype") else "torch_dtype"
    name = (raw.text(key) or "float32").removeprefix("torch.")
    for dtype in WEIGHT_DTYPES:
        if dtype == name:
            return dtype
    raise raw.wrong(key, "one of " + ", ".join(WEIGHT_DTYPES))


def _read_rope(raw: JsonObject, head_dim: int, max_positions: int) -> RopeConfig:
    """Rope under its old keys, its new ones, or both if they agree."""
    readings = [
        _read_one_rope(raw, source, head_dim, max_positions)
        for source in (raw.child("rope_parameters"), raw.child("rope_scaling"))
        if source is not None
    ]
    if not readings:
        return RopeConfig(theta=_read_theta(raw), rotary_dim=head_dim)
    if any(reading != readings[0] for reading in readings):
        raise CheckpointError(
            f"{raw.where}: rope_parameters and rope_scaling disagree; remove the wrong one"
        )
    return readings[0]


def _read_one_rope(
    raw: JsonObject, source: JsonObject, head_dim: int, max_positions: int
) -> RopeConfig:
    if any(isinstance(value, dict) for value in source.values.values()):
        raise CheckpointError(
            f"{source.where} has one entry for each kind of layer; supported is one for all layers"
        )
    for holder in (raw, source):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise CheckpointError(
                f"{holder.where}: partial_rotary_factor is "
                f"{shorten(holder.get('partial_rotary_factor'))}; supported is 1"
            )
    theta = _read_theta(source) if source.has("rope_theta") else _read_theta(raw)
    if raw.has("rope_theta") and theta != _read_theta(raw):
        raise CheckpointError(
            f"{raw.where}: rope_theta is {_read_theta(raw):g}, and {theta:g} in {source.where}; "
            f"correct one of the two"
        )
    scaling = _read_rope_scaling(raw, source, max_positions)
    return RopeConfig(theta=theta, rotary_dim=head_dim, scaling=scaling)


def _read_theta(holder: JsonObject) -> float:
    return holder.number("rope_theta", 1.0, 1e15, 10_000.0)


def _read_rope_scaling(
    raw: JsonObject, source: JsonObject, max_positions: int
) -> LinearRopeScaling | Llama3RopeScaling | None:
    kind = source.text("rope_type") or source.text("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=source.number("factor", 1.0, 1e6))
    if kind == "llama3":
        return _read_llama3_scaling(raw, source, max_positions)
    why = (
        "it would make a token's keys depend on the length of its own request; "
        if kind == "dynamic"
        else ""
    )
    raise CheckpointError(
        f"{source.where}: rope type {shorten(kind)} is not supported; {why}"
        f"supported are default, linear and llama3"
    )


def _read_llama3_scaling(
    raw: JsonObject, source: JsonObject, max_positions: int
) -> Llama3RopeScaling:
    key = "original_max_position_embeddings"
    original = (raw if raw.has(key) else source).whole(key, 1, MAX_POSITIONS, max_positions)
    scaling = Llama3RopeScaling(
        factor=source.number("factor", 1.0, 1e6),
        low_freq_factor=source.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=source.number("high_freq_factor", 1e-6, 1e6),
        original_max_position_embeddings=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{source.where}: high_freq_factor {scaling.high_freq_factor:g} is not above "
            f"low_freq_factor {scaling.low_freq_factor:g}; correct one of the two"
        )
    return scaling


def _format_rope_scaling(rope: RopeConfig) -> dict[str, object] | None:
    scaling = rope.scaling
    if scaling is None:
        return None
    if isinstance(scaling, LinearRopeScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
