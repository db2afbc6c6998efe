"""The op table: every operation a decoder may use, by name and signature.

Model code calls these and nothing else. `ops.reference` defines each in plain jnp; faster tables
are tested against it. Invariant (solo-exactness): the order of the reductions behind an output
element follows from the weight's shape alone, never from the batch.

Legend: T padded tokens · R rows · L logit rows · E embed · F MLP · N out · K in · Hq/Hkv heads ·
D head size · V vocabulary · P pages a row · C output columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.model_config import ModelConfig

NUM_TOP = 20
"""Top log probabilities a step can report (`--max-logprobs`)."""

COLUMN_TOKEN, COLUMN_FINITE, COLUMN_LOGPROB, COLUMN_RANK, COLUMN_TOP = range(5)
NUM_COLUMNS = COLUMN_TOP + 2 * NUM_TOP
"""Of a step's int32 result: token, finite flag, logprob bits, rank, top ids, top logprob bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What is fixed about the arithmetic: the model, the activations' type, the page size."""

    model: ModelConfig
    dtype: Any
    page_size: int

    @property
    def attention_scale(self) -> float:
        return self.model.head_dim**-0.5


class Linear(NamedTuple):
    """A weight in its table's own layout, and its bias."""

    weight: Any  # [N, K] in the reference table
    bias: Any | None  # [N]


class KVPool(NamedTuple):
    """One layer's pages; the layout inside is the table's own."""

    keys: Any
    values: Any


class SamplingArrays(NamedTuple):
    """As `core.batch.SamplingInputs`, on the device."""

    temperature: jax.Array  # [L]
    top_k: jax.Array  # [L]
    top_p: jax.Array  # [L]
    min_p: jax.Array  # [L]
    keys: jax.Array  # [L, 2]
    num_logprobs: jax.Array  # [L]


class StepArrays(NamedTuple):
    """As `core.batch.ModelInputs`, on the device, with the row of each token."""

    num_tokens: jax.Array  # []
    num_logits: jax.Array  # []
    token_ids: jax.Array  # [T]
    token_rows: jax.Array  # [T]
    positions: jax.Array  # [T]
    slot_mapping: jax.Array  # [T]
    query_starts: jax.Array  # [R + 1]
    kv_lens: jax.Array  # [R]
    logit_indices: jax.Array  # [L]
    logit_rows: jax.Array  # [L]
    page_table: jax.Array  # [R, P]
    sampling: SamplingArrays


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

    def new_kv_pool(self, num_pages: int, fill: float) -> KVPool:
        """One layer's pages, every element `fill`; traced."""
        ...

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        """Residual stream [T, E], float32."""
        ...

    def rms_norm(self, x: jax.Array, weight: jax.Array, count: jax.Array) -> jax.Array:
        """x / rms(x) * weight, [·, E] float32 to activations; the first `count` rows matter."""
        ...

    def rms_norm_logit_rows(self, x: jax.Array, weight: jax.Array, step: StepArrays) -> jax.Array:
        """`rms_norm` of the rows of x [T, E] whose logits are wanted: activations [L, E]."""
        ...

    def linear(
        self,
        x: jax.Array,
        weight: Linear,
        num_out: int,
        count: jax.Array,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """[·, K] to [·, N]: activations, or float32 `residual` + x W when one is given."""
        ...

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        """silu(x Wg) * (x Wu), [T, E] to activations [T, F]."""
        ...

    def rope_append_attend(
        self,
        qkv: jax.Array,
        pool: KVPool,
        norms: tuple[jax.Array, jax.Array] | None,
        rope: jax.Array,
        step: StepArrays,
    ) -> tuple[jax.Array, KVPool]:
        """Normalises (where `norms`) and rotates q and k, writes k and v at their slots, attends.

        qkv [T, (Hq + 2 Hkv) D], rope [positions, rotary_dim] of cosines then sines; gives
        activations [T, Hq D] and the pool, updated in place.
        """
        ...

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        """Logits of x [L, E] and each row's choice: int32 [L, C]."""
        ...


def kv_bytes_per_token(spec: DecoderSpec) -> int:
    """K and V of one token in all layers."""
    return 2 * spec.model.num_layers * spec.model.kv_size * np.dtype(spec.dtype).itemsize
