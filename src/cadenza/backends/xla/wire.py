"""One buffer up: `ModelInputs` as a single int32 array, and back apart inside the program.

One upload a step costs less than fifteen. Knows only the order of the fields. Invariant:
`unpack(pack_inputs(inputs))` has every field of `inputs`, bit for bit.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.table import SamplingArrays, StepArrays
from cadenza.core.batch import LAST_SAMPLED, NUM_SCORE_ROWS, Int32Array, ModelInputs


@dataclass(frozen=True, slots=True)
class WireShape:
    """T padded tokens, R rows."""

    num_tokens: int
    num_rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the fields, in order."""
        tokens, rows, logits = self.num_tokens, self.num_rows, self.num_logits
        return (1, 1, tokens, tokens, tokens, rows + 1, rows, *[logits] * 9, 2 * logits)

    @property
    def num_logits(self) -> int:
        return self.num_rows + NUM_SCORE_ROWS

    @property
    def size(self) -> int:
        return sum(self.sizes)


def pack_inputs(inputs: ModelInputs) -> Int32Array:
    """Every field of a step's inputs but what is sent apart, as one int32 array."""
    sampling = inputs.sampling
    return np.concatenate(
        [
            np.array([inputs.num_tokens, inputs.num_logits], np.int32),
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_starts,
            inputs.kv_lens,
            inputs.logit_indices,
            inputs.logit_rows,
            sampling.temperature.view(np.int32),
            sampling.top_k,
            sampling.top_p.view(np.int32),
            sampling.min_p.view(np.int32),
            sampling.num_logprobs,
            sampling.has_rules,
            sampling.targets,
            sampling.keys.view(np.int32).reshape(-1),
        ]
    )


def unpack(
    shape: WireShape, wire: jax.Array, last_sampled: jax.Array, page_table: jax.Array
) -> StepArrays:
    """The step's arrays, with each token's row and the tokens that were still on the device."""
    parts: list[jax.Array] = []
    start = 0
    for size in shape.sizes:
        parts.append(wire[start : start + size])
        start += size
    counts, token_ids, positions, slots, starts, kv_lens = parts[:2], *parts[2:7]
    logit_indices, logit_rows, temperature, top_k, top_p, min_p = parts[7:13]
    num_logprobs, has_rules, targets, keys = parts[13:]
    tokens = jnp.arange(shape.num_tokens)
    token_rows = jnp.searchsorted(starts[1:], tokens, side="right", method="scan_unrolled")
    token_rows = jnp.minimum(token_rows, shape.num_rows - 1).astype(jnp.int32)
    token_ids = jnp.where(token_ids == LAST_SAMPLED, last_sampled[token_rows], token_ids)
    return StepArrays(
        num_tokens=counts[0][0],
        num_logits=counts[1][0],
        token_ids=token_ids,
        token_rows=token_rows,
        positions=positions,
        slot_mapping=slots,
        query_starts=starts,
        kv_lens=kv_lens,
        logit_indices=logit_indices,
        logit_rows=logit_rows,
        page_table=page_table,
        sampling=SamplingArrays(
            temperature=_as_float(temperature),
            top_k=top_k,
            top_p=_as_float(top_p),
            min_p=_as_float(min_p),
            keys=jax.lax.bitcast_convert_type(keys, jnp.uint32).reshape(-1, 2),
            num_logprobs=num_logprobs,
            has_rules=has_rules,
            targets=targets,
        ),
    )


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
