"""What a model is: `ModelConfig`.

Owns the bound of every size, and what the sizes imply. Knows no file: `config_json` reads and
writes it, `families` say how. Invariant: a `ModelConfig` that was read is within bounds and
describes the model's arithmetic completely.
"""

from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.dtypes import WeightDType, item_bytes
from cadenza.checkpoint.rope_config import RopeConfig

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 1 << 12
MAX_EXPERTS_IN_ALL = 1 << 15
"""Of all layers together, since each has tensors of its own."""

Activation = Literal["silu", "gelu_tanh", "gelu"]

QKNorm = Literal["head", "all_heads"]
"""Queries and keys normed head by head, or all query heads of a token at once and all key heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How a layer attends: to its last `window` tokens or to all, with rotated heads or plain; and
    whether its MLP is a mixture of experts.
    """

    window: int | None = None
    has_rope: bool = True
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What the tensors of a mixture are called: `block`.gate and `block`.experts.0.`up`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, each a gated MLP, of which a router chooses some for each token.

    A token's experts are those of its largest router logits. Their outputs are weighted by a
    softmax over all experts, or with `over_chosen` over the chosen ones, and summed.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    over_chosen: bool
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and arithmetic. MLPs are gated, one or a mixture; norms are RMS.

    Args:
        family: its `model_type`.
        intermediate_size: of the MLPs that are not mixtures.
        experts: of the layers whose kind has them.
        layer_pattern: the layers' kinds, repeated until there are `num_layers`.
        rope: of the layers that have one.
        window_rope: of those with a window, where it is another.
        has_pre_norms: a layer's attention and its MLP each norm their input.
        has_post_norms: each norms its output, before that is added to the residual stream.
        norm_adds_one: a norm multiplies by 1 + its weight.
        has_fused_tensors: the checkpoint stores q, k and v as one tensor, and gate and up as one.
        attention_scale: of the scores; None is one over the root of `head_dim`.
        attention_soft_cap: scores become cap * tanh(score / cap).
        logit_soft_cap: logits likewise, after they were divided by `logit_divisor`.
        embedding_scale: of the embedded tokens.
        residual_scale: of what is added to the residual stream.
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

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer."""
        repeats = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * repeats)[: self.num_layers]

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The different ropes of the layers, in the order of their first use."""
        return tuple(dict.fromkeys(map(self.rope_of, self.layer_kinds)))

    def rope_of(self, kind: LayerKind) -> RopeConfig | None:
        """How a layer's heads are rotated; None where they are not."""
        if not kind.has_rope:
            return None
        return self.rope if kind.window is None else self.window_rope or self.rope

    def kv_bytes_per_token(self, dtype: WeightDType) -> int:
        """Bytes of keys and values that one token needs in all layers."""
        return 2 * self.num_layers * self.kv_size * item_bytes(dtype)
