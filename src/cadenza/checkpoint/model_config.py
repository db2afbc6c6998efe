"""A model's shape and arithmetic: `ModelConfig`.

Owns the bounds of all sizes, and what follows from the sizes. Invariant: a `ModelConfig` that was
read is within bounds and describes the model's arithmetic completely.
"""

from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.dtypes import WeightDType, item_bytes
from cadenza.checkpoint.mtp_layout import MTPLayout
from cadenza.checkpoint.rope_config import RopeConfig
from cadenza.config import KVCacheDType

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 1 << 12
MAX_TOTAL_EXPERTS = 1 << 15
"""In all layers together; every expert has its own tensors."""

Activation = Literal["silu", "gelu_tanh", "gelu"]

QKNorm = Literal["head", "all_heads"]
"""Norm of queries and keys: of each head, or over all query heads (all key heads) of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A layer's attention window in tokens (None for full attention), whether it applies rotary
    positions, and whether its MLP is a mixture of experts.
    """

    window: int | None = None
    has_rope: bool = True
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensor names of a mixture: `{block}.gate`, `{block}.experts.0.{up}` and so on."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: a router chooses `num_chosen` gated MLPs for each token.

    The chosen experts are those with the largest router logits. Their outputs are summed, weighted
    by a softmax over all experts, or over the chosen ones if `over_chosen`.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    over_chosen: bool
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder with gated MLPs and RMS norms.

    Args:
        family: the `model_type` of config.json.
        intermediate_size: width F of the MLPs that are not mixtures.
        experts: the mixture of layers with `LayerKind.has_experts`.
        layer_pattern: the kinds of the layers, repeated up to `num_layers`.
        rope: rotary positions of layers with `LayerKind.has_rope`.
        window_rope: the same for layers with a window; None takes `rope`.
        has_pre_norms: norms at the input of attention and of the MLP.
        has_post_norms: norms at the output of attention and of the MLP, before the residual sum.
        norm_adds_one: norms multiply by 1 + weight instead of weight.
        has_fused_tensors: q, k and v are stored as one tensor, and gate and up as another.
        attention_scale: factor of the attention scores; None is 1 / sqrt(`head_dim`).
        attention_soft_cap: scores become cap * tanh(score / cap).
        logit_soft_cap: the same for logits, after the division by `logit_divisor`.
        embedding_scale: factor of the token embeddings.
        residual_scale: factor of the outputs of attention and MLP before the residual sum.
        num_mtp_layers: layers that predict further tokens, stored beside the decoder's; they are no
            part of its arithmetic.
        mtp_layout: how these are stored, and which hidden states they take; None without them.
        reads_hidden: it is such a layer: its first input is a linear of another model's hidden
            states and of the embeddings, each of which is normed (`checkpoint.mtp_head`).
        max_position_embeddings: longest context in tokens.
        dtype: data type of the stored weights.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    layer_pattern: tuple[LayerKind, ...] = (LayerKind(),)
    experts: ExpertsConfig | None = None
    activation: Activation = "silu"
    qk_norm: QKNorm | None = None
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norm_adds_one: bool = False
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    has_fused_tensors: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0
    mtp_layout: MTPLayout | None = None
    reads_hidden: bool = False
    max_position_embeddings: int
    dtype: WeightDType
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def query_size(self) -> int:
        """Total width of the query heads, Hq * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads and of the value heads, Hkv * D each."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        repeats = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * repeats)[: self.num_layers]

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The distinct ropes of the layers, in order of first use."""
        return tuple(dict.fromkeys(map(self.rope_of, self.layer_kinds)))

    def rope_of(self, kind: LayerKind) -> RopeConfig | None:
        """The rope of a layer of this kind; None if it has none."""
        if not kind.has_rope:
            return None
        return self.rope if kind.window is None else self.window_rope or self.rope

    def kv_bytes_per_token(self, dtype: WeightDType, kv_cache_dtype: KVCacheDType = "auto") -> int:
        """Bytes of one token's keys and values in all layers, for activations of `dtype`.

        In int8, each key and value of a head has a float32 scale.
        """
        head = self.head_dim * item_bytes(dtype)
        if kv_cache_dtype == "int8":
            head = self.head_dim + item_bytes("float32")
        return 2 * self.num_layers * self.num_kv_heads * head
