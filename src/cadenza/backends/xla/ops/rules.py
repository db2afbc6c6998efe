"""Token rules, applied to a row's logits before sampling: the definition, in plain jnp.

In this order:
1. Banned tokens are set to -inf: those that are not allowed, those that would complete a bad word,
   and stop tokens before the minimum length.
2. Biases are added.
3. Logits of tokens in the context are divided by the repetition penalty if positive, otherwise
   multiplied by it.
4. The frequency penalty is subtracted once per occurrence of a token in the output.
5. The presence penalty is subtracted once for each token in the output.

The context is read from the token history on the device, which has one token per KV slot, through
the row's page table. It is shared, copied and recomputed together with the KV.

Legend: L logit rows · V vocabulary · N positions of a context · W words (`core.token_rules`).
"""

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.table import StepArrays
from cadenza.core import token_rules as words
from cadenza.core.step_schema import NO_RULES
from cadenza.request import MAX_BAD_WORD_TOKENS, MAX_BIASES


def apply_rules(logits: jax.Array, step: StepArrays, page_size: int) -> jax.Array:
    """Applies each row's rules to logits [L, V]; rows without rules are bitwise unchanged."""
    if step.rules is None:
        return logits

    def ruled() -> jax.Array:
        return jnp.where(has_rules[:, None], _ruled(logits, step, page_size), logits)

    has_rules = step.logits.rule_record != NO_RULES
    return jax.lax.cond(jnp.any(has_rules), ruled, lambda: logits)


def _ruled(logits: jax.Array, step: StepArrays, page_size: int) -> jax.Array:
    assert step.rules is not None
    records = step.rules.records[step.logits.rule_record]  # [L, W]
    lengths = step.logits.positions  # [L], tokens before the one to choose
    context = _contexts(step, lengths, page_size)  # [L, N]
    num_prompt = records[:, words.NUM_PROMPT]
    banned = _not_allowed(records, logits.shape[1])
    banned |= _members(_bad_word_ends(records, context, lengths, num_prompt), logits.shape[1])
    stops = records[:, words.STOPS : words.STOPS + words.MAX_STOPS]
    is_early = (lengths < records[:, words.STOPS_FROM])[:, None]
    banned |= _members(jnp.where(is_early, stops, words.NONE), logits.shape[1])
    values = jnp.where(banned, -jnp.inf, logits)
    values = values + _biases(records, logits.shape[1])
    return _penalised(values, records, context, lengths)


def _contexts(step: StepArrays, lengths: jax.Array, page_size: int) -> jax.Array:
    """The tokens before each logit row's position [L, N]; NONE from `lengths` on."""
    assert step.rules is not None
    tables = step.page_table[step.logits.rows]  # [L, P]
    positions = jnp.arange(tables.shape[1] * page_size)  # [N]
    is_inside = positions < lengths[:, None]
    pages = jnp.where(is_inside, tables[:, positions // page_size], 0)
    tokens = step.rules.history[pages * page_size + positions % page_size]
    return jnp.where(is_inside, tokens, words.NONE)


def _not_allowed(records: jax.Array, vocab_size: int) -> jax.Array:
    tokens = jnp.arange(vocab_size)
    mask = records[:, words.MASK + tokens // 32] >> (tokens % 32)  # [L, V]
    return (records[:, words.HAS_MASK] > 0)[:, None] & (mask & 1 == 0)


def _members(token_ids: jax.Array, vocab_size: int) -> jax.Array:
    """Whether each token is among the row's `token_ids` [L, ·], where NONE is ignored: [L, V]."""
    rows = jnp.arange(len(token_ids))[:, None]
    places = jnp.where(token_ids < 0, vocab_size, token_ids)
    nothing = jnp.zeros((len(token_ids), vocab_size), jnp.bool_)
    return nothing.at[rows, places].set(True, mode="drop")


def _bad_word_ends(
    records: jax.Array, context: jax.Array, lengths: jax.Array, num_prompt: jax.Array
) -> jax.Array:
    """The last token of each bad word whose other tokens end the output, else NONE: [L, B]."""
    listed = records[:, words.BAD_WORDS : words.BAD_WORDS + MAX_BAD_WORD_TOKENS]  # [L, B]
    rows = jnp.arange(len(listed))[:, None]
    places = jnp.arange(MAX_BAD_WORD_TOKENS)[None, :]
    behind = jnp.concatenate([listed[:, 1:], jnp.full_like(listed[:, :1], words.NONE)], axis=1)
    is_end = (listed >= 0) & (behind < 0)

    def more(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[1])

    def look_back(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Matches the token `distance` before a word's end; without one, the word has matched."""
        distance, is_open, is_met = state
        wanted = listed[rows, jnp.maximum(places - distance, 0)]
        at = lengths - distance  # [L]
        came = context[rows, jnp.maximum(at, 0)[:, None]]
        is_same = (wanted == came) & (at >= num_prompt)[:, None]
        is_over = is_open & (wanted < 0)
        return distance + 1, is_open & ~is_over & is_same, is_met | is_over

    start = (jnp.int32(1), is_end, jnp.zeros_like(is_end))
    _, _, is_met = jax.lax.while_loop(more, look_back, start)
    return jnp.where(is_met, listed, words.NONE)


def _biases(records: jax.Array, vocab_size: int) -> jax.Array:
    ids = records[:, words.BIAS_IDS : words.BIAS_IDS + MAX_BIASES]
    bits = records[:, words.BIAS_VALUES : words.BIAS_VALUES + MAX_BIASES]
    rows, places = jnp.arange(len(ids))[:, None], jnp.where(ids < 0, vocab_size, ids)
    nothing = jnp.zeros((len(ids), vocab_size), jnp.float32)
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return nothing.at[rows, places].set(values, mode="drop")


def _penalised(
    values: jax.Array, records: jax.Array, context: jax.Array, lengths: jax.Array
) -> jax.Array:
    vocab_size = values.shape[1]
    first = words.PRESENCE
    penalties = jax.lax.bitcast_convert_type(records[:, first : first + 3], jnp.float32)
    presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
    is_output = jnp.arange(context.shape[1]) >= records[:, words.NUM_PROMPT, None]
    is_output &= jnp.arange(context.shape[1]) < lengths[:, None]
    rows, places = jnp.arange(len(values))[:, None], jnp.where(context < 0, vocab_size, context)
    counts = jnp.zeros(values.shape, jnp.int32)
    counts = counts.at[rows, places].add(is_output.astype(jnp.int32), mode="drop")  # [L, V]
    repeated = jnp.where(values > 0, values / repetition, values * repetition)
    values = jnp.where(_members(context, vocab_size), repeated, values)
    values = values - frequency * counts.astype(jnp.float32)
    return values - presence * (counts > 0)
