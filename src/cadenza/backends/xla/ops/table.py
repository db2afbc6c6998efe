"""The values that operations take and return, and what every op table has beside operations.
Legend: T padded tokens · R rows · L logit rows · E embed · F MLP · N out · K in · Hq/Hkv heads · D
head size · V vocabulary · P pages per row · C result columns · X experts · A experts per token."""

# Of layers with a state: M channels · J inputs of their convolution · S slots of states ·
# Hv heads · Dk/Dv sizes of keys and values. Of a gated delta net: Hk key heads · M = 2 Hk Dk +
# Hv Dv: queries, keys, values. Of a selective scan: G groups · M = Hv Dv + 2 G Dk: values, keys,
# queries.

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.batch.step_schema import LogitInputs, RowInputs, TokenInputs, specs_of
from cadenza.checkpoint.tensor_formats import format_of
from cadenza.config import KVCacheDType, Quantization
from cadenza.models.layer_kind import HeadShape, LatentShape, Recurrence
from cadenza.models.model_config import ModelConfig
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import FLOAT_FORMATS, WeightDType, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The constants of an op table. `dtype` is the type of activations, and of KV that is auto.
    `is_portable`: the operations have the same bits on every CPU. `num_devices` share the whole
    model, of which `model` is the part of each. `is_sparse`: a step's tokens may have rope
    positions and windows of their own."""

    model: ModelConfig
    dtype: Any
    page_size: int
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    is_portable: bool = False
    num_devices: int = 1
    is_sparse: bool = False

    @property
    def has_kv_codes(self) -> bool:
        return self.kv_cache_dtype == "int8"

    @property
    def weight_format(self) -> WeightFormat:
        return FLOAT_FORMATS[self._dtype_name]

    def format_of(self, tensor: TensorSpec) -> WeightFormat:
        return format_of(tensor, self._dtype_name, self.quantization)

    @property
    def _dtype_name(self) -> WeightDType:
        return cast(WeightDType, np.dtype(self.dtype).name)


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight in the layout of its op table, its bias, and the format of the weight's elements:
    the first one's if fused linears have several formats of codes. `num_out` is N, of all parts
    together."""

    weight: Any  # [N, K] in the reference table
    bias: Any | None  # [N]
    format: WeightFormat
    num_out: int


class ExpertChoice(NamedTuple):
    """The experts of each token and the weights of their outputs in the sum; all NaN if the largest
    of the token's router logits is not finite."""

    ids: jax.Array  # [T, A]
    weights: jax.Array  # [T, A]


class ScaledNorm(NamedTuple):
    """A norm whose sum with the residual stream is multiplied by a number."""

    weight: Any  # [E]
    factor: Any  # [1]


class HeadFactors(NamedTuple):
    """The parameters that turn projections into query and key heads: norm weights and rope. A norm
    of D values is applied to each head; a longer one is applied across all heads."""

    norms: tuple[Any, ...] | None  # [D] each, or [Hq D] and [Hkv D]; the first alone without keys
    # With an odd number of columns the last one has what queries are multiplied by.
    rope: Any  # [positions, rotary_dim]: cosines, then sines; no rotation without columns
    rope_positions: jax.Array  # [T]: the rows of `rope` for the step's tokens
    sinks: Any | None = None  # [Hq]: a score beside those of the tokens, whose value is 0


class HeadInputs(NamedTuple):
    """The projections of the normed stream, as activations. Without values they are made of the
    keys; without keys, too, those of another layer are read."""

    qkv: jax.Array  # [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]
    gate: jax.Array | None = None  # [T, Hq D]: its sigmoid multiplies the output


@dataclass(frozen=True, slots=True)
class AttendingLayer:
    """The layer's index in the KV pool of its group, its heads, and the sliding window: the most
    tokens that a token attends to, with itself; None is unlimited. With `sees_spans` a token also
    attends to all of its span of the step (`TokenInputs.reaches`); with `has_starts` the window
    begins where `TokenInputs.window_starts` says."""

    index: int
    heads: HeadShape
    window: int | None = None
    sees_spans: bool = False
    has_starts: bool = False


class LatentInputs(NamedTuple):
    """Of attention over latents: queries times the keys' linears, and projections of the normed
    stream."""

    absorbed: jax.Array  # [T, Hq rank], activations
    queries: jax.Array  # [T, Hq D], activations; the end of each head is rotated
    keys: (
        jax.Array
    )  # [T, rank + rotary_size], float32: latents before their norm; the end is rotated


class LatentFactors(NamedTuple):
    """The weight of the latents' norm and the rope."""

    norm: Any  # [rank]
    rope: Any  # [positions, rotary_size]
    rope_positions: jax.Array  # [T]: its rows for the step's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """The layer's index in the KV pool of its group, its shape, and the constant of its norms."""

    index: int
    shape: LatentShape
    norm_eps: float


class KVPool(NamedTuple):
    """The KV pages of the layers of a group, along the first axis of an array each, or a tree of
    them; the op table chooses the rest of the layout. `values` is None where they are parts of the
    keys (`KVGroup.has_values`)."""

    keys: Any
    values: Any


Shape = TypeVar("Shape", bound=Recurrence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayer(Generic[Shape]):
    """The layer's index in the pools, its shape, and the constant of its output norm."""

    index: int
    shape: Shape
    norm_eps: float


class DeltaWeights(NamedTuple):
    """Of a gated delta net between its projections, float32."""

    conv: Any  # [J, M], the oldest input first
    decay: Any  # [Hv]: -exp(A_log)
    decay_bias: Any  # [Hv]
    norm: Any  # [Dv]


class DeltaInputs(NamedTuple):
    """Projections of the normed stream: activations, and the rates in float32."""

    mixed: jax.Array  # [T, M], before the convolution
    gate: jax.Array  # [T, Hv Dv]
    rates: jax.Array  # [T, 2 Hv]: the inputs of the decays, then of the write strengths


class ConvWeights(NamedTuple):
    """Of a gated short convolution between its projections, float32."""

    conv: Any  # [J, M], the oldest input first
    bias: Any | None  # [M]


class ScanWeights(NamedTuple):
    """Of a selective scan between its projections, float32."""

    conv: Any  # [J, M], the oldest input first
    conv_bias: Any | None  # [M]
    decay: Any  # [Hv]: -exp(A_log)
    rate_bias: Any  # [Hv]
    skip: Any  # [Hv]: D
    norm: Any  # [Hv Dv]


class ScanInputs(NamedTuple):
    """Projections of the normed stream: activations, and the rates in float32."""

    mixed: jax.Array  # [T, M], before the convolution
    gate: jax.Array  # [T, Hv Dv]
    rates: jax.Array  # [T, Hv]: dt before its bias and softplus


class StatePool(NamedTuple):
    """The slots of all layers with a state; the op table chooses the layout after the slots."""

    inputs: Any  # [S, layers, ...]: the newest J - 1 inputs of the convolution
    states: Any | None  # [S, layers, ...], float32; None for layers without matrices


class LayerPools(NamedTuple):
    """What layers keep of earlier tokens: KV of each of `ModelConfig.kv_groups`, states, and
    scores."""

    kv: tuple[KVPool, ...]
    states: StatePool | None = None
    scores: Any | None = None  # float32 [2, R, positions]: `add_scores`

    def with_kv(self, group: int, pool: KVPool) -> "LayerPools":
        return self._replace(kv=(*self.kv[:group], pool, *self.kv[group + 1 :]))


class StepStates(NamedTuple):
    """Negative for none."""

    initial: jax.Array  # [R]: the slot of the state before a row's first token; none is zeros
    kept: jax.Array  # [T]: the slot that gets the state after a token


class RuleArrays(NamedTuple):
    """The records of token rules (`batch.token_rules`) and the token at each KV slot."""

    records: jax.Array  # [L, W]
    history: jax.Array  # [slots]


class StepArrays(NamedTuple):
    """A step's inputs (`batch.step_schema`) on the device, and the arrays derived there."""

    num_tokens: jax.Array  # []
    num_logits: jax.Array  # []
    tokens: TokenInputs[jax.Array]  # [T]; LAST_SAMPLED is replaced by the token
    token_rows: jax.Array  # [T]
    rows: RowInputs[jax.Array]  # [R]
    logits: LogitInputs[jax.Array]  # [L]
    page_table: jax.Array  # [R, P]
    rules: RuleArrays | None = None  # None: no row has rules


jax.tree_util.register_dataclass(Linear, ["weight", "bias"], ["format", "num_out"])
for _group in (TokenInputs, RowInputs, LogitInputs):
    jax.tree_util.register_dataclass(_group, [spec.name for spec in specs_of(_group)], [])


class BaseTable:
    """What every op table has beside its operations, for one `DecoderSpec`."""

    name: str

    # Whether XLA does not see the operations of a `compute`. Then a step has the same bits when its
    # tokens are chosen in a `compute` of its own, and XLA has nothing to optimise.
    is_opaque: bool

    # Whether rows after the true number are not computed, and any size of a step will do.
    skips_padding = False

    # Whether the bits of its kernels are compared on the device at hand before a model serves.
    is_proved_at_load = False

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._model = spec.model

    def loading(self, packed: Path | None) -> AbstractContextManager[None]:  # noqa: ARG002 (nothing is packed)
        """Encloses the calls of `load_…` for one model. A table that packs weights reads them from
        the file `packed` if it is there, and writes it otherwise; None: no file."""
        return nullcontext()

    def unwritten(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """An array whose content nothing reads before it is written; called under tracing. Its
        memory becomes resident as it is written, where the table can do that."""
        return jnp.zeros(shape, dtype)

    def compute(self, decode: Callable[[Any], Any]) -> Any:
        """Traces `decode(table)`, which uses only operations of the table that it is given, and
        returns its tree of arrays. A table may run them as one call."""
        return decode(self)


# x Phi(x) by erf, its approximation by tanh, x sigmoid(1.702 x), and x sigmoid(x).
EncoderActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

# Keys of a softmax span; spans begin at multiples of it, from the image's first row.
ENCODER_SPAN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The heads of a tower's attention: as many keys and values as queries."""

    num_heads: int
    head_dim: int
    scale: float  # of the scores
    norm_eps: float = 1e-6  # of the norms of heads

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class EncoderBlock(NamedTuple):
    """Rows of an image that are computed together; int32 [] each."""

    start: jax.Array  # the first one's index in the image
    num_defined: jax.Array  # at most B
    num_rows: jax.Array  # of the whole image, at most N


class EncoderFactors(NamedTuple):
    """Value i of a head is rotated with value i + R / 2, as a decoder's: towers whose pairs lie
    elsewhere have their weights' rows, and norms, reordered at loading."""

    rotations: Any | None = None  # [B, R] float32: cosines, then sines
    norms: tuple[Any, Any] | None = None  # [D] each: RMS norms of a head's query and key
    norms_values: bool = False  # by an RMS norm without weight


class EncoderHeads(NamedTuple):
    """Queries, keys and values of an image's rows in one layer; the table chooses the layout."""

    queries: Any
    keys: Any
    values: Any


class ImageRows(NamedTuple):
    """Embeddings of images, and which of them each token has."""

    rows: jax.Array  # [S, parts E], activations
    slots: jax.Array  # [T], int32: negative for a token of text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLayer:
    """A layer that scores prompts: its index in the KV pool of its group, its heads, and whether it
    is the first or the last one of a step that does."""

    index: int
    heads: HeadShape
    is_first: bool
    is_last: bool
