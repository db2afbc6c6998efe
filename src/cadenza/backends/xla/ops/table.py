"""The op table: every operation a decoder may use, by name and signature.

Model code calls these and nothing else. `ops.reference` defines each in plain jnp; faster tables
are tested against it. Invariant (solo-exactness): the order of the reductions behind an output
element follows from the weight's shape alone, never from the batch.

Legend: T padded tokens · R rows · L logit rows · E embed · F MLP · N out · K in · Hq/Hkv heads ·
D head size · V vocabulary · P pages a row · C output columns · X experts · A experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy.typing as npt

from cadenza.checkpoint.model_config import ModelConfig
from cadenza.core.step_schema import LogitInputs, RowInputs, TokenInputs, specs_of

NUM_TOP = 20
"""Top log probabilities a step can report (`--max-logprobs`)."""

COLUMN_TOKEN, COLUMN_STATE, COLUMN_LOGPROB, COLUMN_RANK, COLUMN_TOP = range(5)
NUM_COLUMNS = COLUMN_TOP + 2 * NUM_TOP
"""Of a step's int32 result: token, row state, logprob bits, rank, top ids, top logprob bits."""


STATE_NOT_FINITE, STATE_CHOSEN, STATE_NONE_ALLOWED = range(3)
"""The row's logits held a NaN or an infinity · a token was chosen · its rules allow no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What is fixed about the arithmetic: the model, the activations' type, the page size."""

    model: ModelConfig
    dtype: Any
    page_size: int

    @property
    def attention_scale(self) -> float:
        return self.model.attention_scale or self.model.head_dim**-0.5


class Linear(NamedTuple):
    """A weight in its table's own layout, and its bias."""

    weight: Any  # [N, K] in the reference table
    bias: Any | None  # [N]


class ExpertChoice(NamedTuple):
    """The experts of each token, and what their outputs are multiplied by before they are summed.

    All weights of a token are NaN where its router's logits give none.
    """

    ids: jax.Array  # [T, A]
    weights: jax.Array  # [T, A]


class HeadFactors(NamedTuple):
    """What makes query and key heads of a projection: the weights of their norms, and the rope.

    A norm of D values is each head's own; one of all heads' values spans them.
    """

    norms: tuple[Any, ...] | None  # [D] each, or [Hq D] and [Hkv D]
    rope: Any  # [positions, rotary_dim] of cosines, then sines; no columns turn nothing


@dataclass(frozen=True, slots=True)
class AttendingLayer:
    """Which layer's keys and values a call means, and how many tokens each of its tokens sees at
    most, itself included; None is all.
    """

    index: int
    window: int | None = None


class KVPool(NamedTuple):
    """All layers' pages, one behind the other along the first axis; the rest of the layout is the
    table's own.
    """

    keys: Any
    values: Any


class RuleArrays(NamedTuple):
    """What rows may choose (`core.token_rules`), and the token at each KV slot."""

    records: jax.Array  # [R, W]
    history: jax.Array  # [slots]


class StepArrays(NamedTuple):
    """A step's declared groups on the device, and what the device adds to them."""

    num_tokens: jax.Array  # []
    num_logits: jax.Array  # []
    tokens: TokenInputs[jax.Array]  # [T]; no id is LAST_SAMPLED any more
    token_rows: jax.Array  # [T]
    rows: RowInputs[jax.Array]  # [R]
    logits: LogitInputs[jax.Array]  # [L]
    page_table: jax.Array  # [R, P]
    rules: RuleArrays | None = None  # without them no row has any


for _group in (TokenInputs, RowInputs, LogitInputs):
    jax.tree_util.register_dataclass(_group, [spec.name for spec in specs_of(_group)], [])


class OpTable(Protocol):
    """One implementation of every operation, for one `DecoderSpec`."""

    @property
    def name(self) -> str: ...

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """The values of T that it wants programs for."""
        ...

    def load_linear(self, parts: list[npt.NDArray[Any]], bias: list[npt.NDArray[Any]]) -> Linear:
        """Weights [Ni, K] of linears with the same input, fused along N, in host memory."""
        ...

    def load_embedding(self, table: npt.NDArray[Any]) -> Linear:
        """The table [V, E], which a tied head uses too."""
        ...

    def load_gate_up(
        self, gate: npt.NDArray[Any], up: npt.NDArray[Any], bias: list[npt.NDArray[Any]]
    ) -> Linear:
        """Gate and up [F, E], for `gated_linear`."""
        ...

    def load_experts_gate_up(
        self, experts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
    ) -> Linear:
        """Gate and up [F, E] of each expert, for `grouped_gated_linear`."""
        ...

    def load_experts_down(self, experts: Sequence[npt.NDArray[Any]]) -> Linear:
        """Each expert's weight [E, F], for `grouped_linear`."""
        ...

    def new_kv_pool(self, num_pages: int, fill: float) -> KVPool:
        """Pages of all layers, every element `fill`; traced."""
        ...

    def copy_slots(
        self, pool: KVPool, source: jax.Array, destination: jax.Array, count: int
    ) -> KVPool:
        """Copies `count` slots of a page, from `source` [] to `destination` [] on, in place.

        All three are multiples of `PAGE_SIZE_UNIT`.
        """
        ...

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        """Residual stream [T, E], float32, scaled by the model's `embedding_scale`."""
        ...

    def to_activations(self, x: jax.Array) -> jax.Array:
        """[T, E] float32 to activations."""
        ...

    def rms_norm(self, x: jax.Array, weight: jax.Array, count: jax.Array) -> jax.Array:
        """x / rms(x) * weight, [·, E] float32 to activations; the first `count` rows matter."""
        ...

    def take_logit_rows(self, x: jax.Array, step: StepArrays) -> jax.Array:
        """The rows of x [T, ·] whose logits are wanted: [L, ·], of which `num_logits` matter."""
        ...

    def linear(
        self,
        x: jax.Array,
        weight: Linear,
        num_out: int,
        count: jax.Array,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """[·, K] to [·, N]: activations, or float32 `residual` + `residual_scale` x W."""
        ...

    def linear_norm_add(
        self, x: jax.Array, weight: Linear, norm: jax.Array, residual: jax.Array, count: jax.Array
    ) -> jax.Array:
        """Float32 `residual` [·, N] + the norm of x W."""
        ...

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        """activation(x Wg) * (x Wu), [T, E] to activations [T, F]."""
        ...

    def route_experts(self, x: jax.Array, router: Linear, count: jax.Array) -> ExpertChoice:
        """The experts of x [T, E] with the largest logits, as the model's `experts` weighs them,
        times its `residual_scale`. Ties go to the lowest id.
        """
        ...

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        """`gated_linear` by each of a token's experts: [T, E] to activations [T, A, F]."""
        ...

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        """Float32 `residual` [T, E] + the weighted sum over a token's experts, x [T, A, F]."""
        ...

    def rope_append_attend(
        self,
        qkv: jax.Array,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        """Normalises and rotates q and k, writes k and v at their slots, attends.

        qkv [T, (Hq + 2 Hkv) D].
        Gives activations [T, Hq D] and the pool, updated in place.
        """
        ...

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        """Logits of x [L, E], divided and capped as the model's are, and each row's choice:
        int32 [L, C]. A logit that is not finite stays so under a cap.
        """
        ...
