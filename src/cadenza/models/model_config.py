"""A model's shape and arithmetic, `ModelConfig`, the bounds of all sizes, and what follows from the
sizes. One that was read is within bounds and describes the model's arithmetic completely."""

import math
from dataclasses import dataclass
from typing import Literal

from cadenza.config import KVCacheDType
from cadenza.models.layer_kind import (
    HeadShape,
    KVGroup,
    LatentShape,
    LayerKind,
    Recurrence,
    state_bytes_of,
)
from cadenza.models.mtp_layout import MTPLayout
from cadenza.models.rope_config import RopeConfig
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.weight_format import WeightDType, item_bytes

MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 1 << 12
MAX_TOTAL_EXPERTS = 1 << 15  # in all layers together; every expert has its own tensors

# What multiplies the up projection: an activation of the gate. With `clamped_swiglu` both are
# bounded first, and 1 is added to the up projection (`CLAMPED_ALPHA`, `CLAMPED_LIMIT`)
Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]

# gate * sigmoid(alpha * gate) of a gate of at most the limit, times 1 + up, which is bounded on
# both sides
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0

# norm of queries and keys: of each head, or over all query (all key) heads of a token
QKNorm = Literal["head", "all_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Tensor names of a family: of the final norm, and within `model.layers.0` and so on. `mixer`:
    the block of a layer's recurrence."""

    final_norm: str = "model.norm"
    # mixer_norm, mlp_norm: the norms before the token mixer and before the MLP, in families without
    # norms after them
    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    attention_out: str = "o_proj"
    recurrence: str = "linear_attn"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None  # of gate and up as one tensor; None if they are `gate` and `up`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensor names of a mixture: `{block}.{router}`, `{block}.experts.0.{up}` and so on; `shared`
    is the MLP for all tokens, within the layer. `are_interleaved`: stacked tensors have the outputs
    of gate and up alternating (`checkpoint.stacked_experts`)."""

    block: str = "mlp"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    are_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidChoice:
    """Experts are chosen by the sigmoids of their logits plus a bias of each, within the groups of
    consecutive experts whose two best have the largest sums; the weights are without the bias.
    `least_sum` is added to the sum that divides the weights, since sigmoids can all be 0."""

    num_groups: int = 1
    num_chosen_groups: int = 1
    has_bias: bool = True
    least_sum: float = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: a router chooses `num_chosen` gated MLPs for each token, those with the
    largest logits. Their outputs are summed, weighted by a softmax over all experts, or over the
    chosen ones if `over_chosen`; with a `sigmoid_choice` by sigmoids, divided by their sum over the
    chosen if `over_chosen`; times `weight_scale`. A shared MLP of the width `shared_size`, if that
    is not 0, adds its output, times the sigmoid of a linear of the token if `has_shared_gate`. With
    `has_bias` the router and all linears of the experts have biases. With `are_beside_mlp` a layer
    has its MLP, too: both have norms of their own, the router reads the normed stream times a scale
    for each value, and each expert has a factor of its weights."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    over_chosen: bool
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    are_beside_mlp: bool = False
    sigmoid_choice: SigmoidChoice | None = None
    weight_scale: float = 1.0
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Per-layer embeddings: each layer gets `size` values of each token, from a table of
    `vocab_size` tokens and from the stream before the first layer, and adds
    norm(projection(activation(gate(stream)) * its values)) to the stream."""

    vocab_size: int
    size: int

    @property
    def embedding_scale(self) -> float:
        """Of the table's rows: sqrt(size), and sqrt(1/2) of their mean with the stream's part."""
        return math.sqrt(self.size / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder with gated MLPs and RMS norms."""

    family: str  # the `model_type` of config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width F of the MLPs that are not mixtures
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig  # rotary positions of layers with `LayerKind.has_rope`
    names: TensorNames = TensorNames()  # of the tensors, in the Hugging Face layout
    window_rope: RopeConfig | None = None  # the same for layers with a window; None takes `rope`
    # the kinds of the layers, repeated up to `num_layers`
    layer_pattern: tuple[LayerKind, ...] = (LayerKind(),)
    experts: ExpertsConfig | None = None  # the mixture of layers with `LayerKind.has_experts`
    activation: Activation = "silu"
    qk_norm: QKNorm | None = None
    has_pre_norms: bool = True  # norms at the input of attention and of the MLP
    # norms at the output of attention and of the MLP, before the residual sum
    has_post_norms: bool = False
    norm_adds_one: bool = False  # norms multiply by 1 + weight instead of weight
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    # q, k and v are stored as one tensor, and gate and up as another
    has_fused_tensors: bool = False
    has_value_norm: bool = False  # values have the RMS norm of each head, without a weight
    layer_inputs: LayerInputsConfig | None = None  # per-layer embeddings; None without them
    has_layer_scales: bool = False  # the stream is multiplied by a stored number after each layer
    # attention's output is multiplied by the sigmoid of a projection of its input, which is stored
    # with the queries: for each head, its query and then its gate
    has_attention_gate: bool = False
    # a query head has a learned score beside those of the tokens, whose value is 0
    has_attention_sinks: bool = False
    # factor of the attention scores; None is 1 / sqrt(head dim)
    attention_scale: float | None = None
    attention_soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    # the same for logits, after the division by `logit_divisor`
    logit_soft_cap: float | None = None
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0  # factor of the token embeddings
    # factor of the outputs of attention and MLP before the residual sum
    residual_scale: float = 1.0
    tie_word_embeddings: bool = False
    # layers that predict further tokens, stored beside the decoder's; they are no part of its
    # arithmetic
    num_mtp_layers: int = 0
    # how these are stored, and which hidden states they take; None without them
    mtp_layout: MTPLayout | None = None
    # it is such a layer: its first input is a linear of another model's hidden states and of the
    # embeddings, each of which is normed (`checkpoint.mtp_head`)
    reads_hidden: bool = False
    max_position_embeddings: int  # longest context in tokens
    dtype: WeightDType  # data type of the stored weights
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    vision: VisionConfig | None = None  # of a model that sees; None for text alone

    @property
    def placeholder(self) -> int | None:
        """The token that stands for images, which no row chooses; None without one in the
        vocabulary."""
        vision = self.vision
        if vision is None or vision.image_token_id >= self.vocab_size:
            return None
        return vision.image_token_id

    @property
    def heads(self) -> HeadShape:
        """Of layers that have none of their own."""
        return HeadShape(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def heads_of(self, kind: LayerKind) -> HeadShape:
        if kind.latent is not None:
            return kind.latent.heads
        return kind.heads or self.heads

    def sees_spans(self, kind: LayerKind) -> bool:
        """Whether the tokens of an image attend to all of it in a layer."""
        reach = None if self.vision is None else self.vision.reach
        return reach == "all" or (reach == "windowed" and kind.window is not None)

    @property
    def latent(self) -> LatentShape | None:
        """The latents of all layers that have them; None if none has."""
        return next((kind.latent for kind in self.layer_kinds if kind.latent is not None), None)

    def scale_of(self, heads: HeadShape) -> float:
        return self.attention_scale or 1.0 / math.sqrt(heads.head_dim)

    @property
    def widest_heads(self) -> HeadShape:
        """Of the layer whose queries, keys and values are the widest."""
        shapes = [self.heads_of(kind) for kind in self.layer_kinds if kind.recurrence is None]
        return max(shapes or [self.heads], key=lambda heads: heads.query_size + 2 * heads.kv_size)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        repeats = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * repeats)[: self.num_layers]

    @property
    def has_rope_axes(self) -> bool:
        """Whether the tokens of images have other rotary positions than their index (M-RoPE)."""
        return self.vision is not None and any(rope and rope.axes for rope in self.ropes)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The distinct ropes of the layers with attention, in order of first use."""
        attending = (kind for kind in self.layer_kinds if kind.recurrence is None)
        return tuple(dict.fromkeys(map(self.rope_of, attending)))

    def rope_of(self, kind: LayerKind) -> RopeConfig | None:
        if not kind.has_rope:
            return None
        return self.rope if kind.window is None else self.window_rope or self.rope

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers with keys and values of their own, by the shape of these, in order of first
        use."""
        layers: dict[tuple[int, int, bool], list[int]] = {}
        for index, kind in enumerate(self.layer_kinds):
            if kind.recurrence is None and kind.kv_source is None:
                shape = (*self.heads_of(kind).kv_shape, kind.latent is None)
                layers.setdefault(shape, []).append(index)
        return tuple(
            KVGroup(num_kv_heads=heads, head_dim=size, layers=tuple(indices), has_values=has_values)
            for (heads, size, has_values), indices in layers.items()
        )

    def kv_index(self, index: int) -> tuple[int, int]:
        """The group of the keys and values that a layer attends to, and their index in it."""
        source = self.layer_kinds[index].kv_source
        index = index if source is None else source
        for number, group in enumerate(self.kv_groups):
            if index in group.layers:
                return number, group.layers.index(index)
        raise ValueError(f"layer {index} has no attention")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        kinds = enumerate(self.layer_kinds)
        return tuple(index for index, kind in kinds if kind.recurrence is not None)

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of all layers that have one; None if none has."""
        kinds = (kind.recurrence for kind in self.layer_kinds)
        return next((each for each in kinds if each is not None), None)

    def kv_bytes_per_token(self, dtype: WeightDType, kv_cache_dtype: KVCacheDType = "auto") -> int:
        """Of one token's keys and values in all layers, for activations of `dtype`. In int8, each
        key and value of a head has a float32 scale."""

        def head_bytes(size: int) -> int:
            if kv_cache_dtype == "int8":
                return size + item_bytes("float32")
            return size * item_bytes(dtype)

        return sum(
            (1 + group.has_values)
            * len(group.layers)
            * group.num_kv_heads
            * head_bytes(group.head_dim)
            for group in self.kv_groups
        )

    def state_bytes(self, dtype: WeightDType) -> int:
        """Of one slot: the recurrent state of a sequence in all layers; 0 without any."""
        shape = self.recurrence
        if shape is None:
            return 0
        return len(self.recurrent_layers) * state_bytes_of(shape, item_bytes(dtype))


def sparse_refusal(model: ModelConfig) -> str | None:
    """Why a model computes no sparse prompts (`cadenza.sparse_prefill`); None if it does."""
    if model.recurrence is not None:
        return "it has layers with a recurrent state, which runs over every token"
    windows = sorted({kind.window for kind in model.layer_kinds if kind.window is not None})
    if len(windows) > 1:
        return (
            f"its layers have windows of {len(windows)} sizes, from {windows[0]} to {windows[-1]}"
        )
    return None


def window_of(model: ModelConfig) -> int | None:
    """The window of a model that computes sparse prompts; None if it has none."""
    return next((kind.window for kind in model.layer_kinds if kind.window is not None), None)


def scoring_refusal(model: ModelConfig) -> str | None:
    """Why a model scores no prompts (`backends.base.PromptScorer`); None if it does."""
    if model.recurrence is not None:
        return "it has layers with a recurrent state"
    if model.latent is not None:
        return "its keys are latents"
    if not scoring_layers(model):
        return "each of its layers has a window"
    return None


def scoring_layers(model: ModelConfig) -> tuple[int, ...]:
    """The layers whose attention scores prompts: those without a window, ascending."""
    kinds = enumerate(model.layer_kinds)
    return tuple(index for index, kind in kinds if kind.window is None and kind.recurrence is None)
