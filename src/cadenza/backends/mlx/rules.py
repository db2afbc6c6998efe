"""Token rules, applied to a row's logits before sampling: `backends.xla.ops.rules` in MLX.

Bans, biases and penalties in the same order and arithmetic. Records are read on the host, where
they are; the tokens before a position are in the token history on the device. Legend: L logit rows
· V vocabulary · N positions of a context · W words (`core.token_rules`).
"""

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cadenza.backends.mlx.arrays import to_device
from cadenza.core import token_rules as words
from cadenza.request import MAX_BAD_WORD_TOKENS, MAX_BIASES

Int32Array = npt.NDArray[np.int32]


def apply_token_rules(
    logits: mx.array, records: Int32Array, context: mx.array, lengths: Int32Array
) -> mx.array:
    """Applies records [L, W] to logits [L, V].

    `context` [L, N] has the tokens before each row's position `lengths` [L], then NONE.
    """
    vocab_size = logits.shape[1]
    banned = _not_allowed(records, vocab_size)
    banned = banned | _members(_bad_word_ends(records, context, lengths), vocab_size)
    stops = records[:, words.STOPS : words.STOPS + words.MAX_STOPS]
    is_early = (lengths < records[:, words.STOPS_FROM])[:, None]
    banned = banned | _members(to_device(np.where(is_early, stops, words.NONE)), vocab_size)
    values = mx.where(banned, -mx.inf, logits)
    values = values + _biases(records, vocab_size)
    return _penalised(values, records, context, lengths)


def _not_allowed(records: Int32Array, vocab_size: int) -> mx.array:
    bits = records[:, words.MASK :].astype("<u4").view(np.uint8)
    mask = np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab_size]  # [L, V]
    return to_device((records[:, words.HAS_MASK] > 0)[:, None] & (mask == 0))


def _members(token_ids: mx.array, vocab_size: int) -> mx.array:
    """Whether each token is among the row's `token_ids` [L, ·], where NONE is ignored: [L, V]."""
    rows = mx.arange(len(token_ids))[:, None]
    places = mx.where(token_ids < 0, vocab_size, token_ids)
    found = mx.zeros((len(token_ids), vocab_size + 1), mx.bool_)
    found[rows, places] = True
    return found[:, :vocab_size]


def _bad_word_ends(records: Int32Array, context: mx.array, lengths: Int32Array) -> mx.array:
    """The last token of each bad word whose other tokens end the output, else NONE: [L, B]."""
    listed = records[:, words.BAD_WORDS : words.BAD_WORDS + MAX_BAD_WORD_TOKENS]  # [L, B]
    behind = np.concatenate([listed[:, 1:], np.full_like(listed[:, :1], words.NONE)], axis=1)
    is_open = (listed >= 0) & (behind < 0)
    num_prompt = records[:, words.NUM_PROMPT]
    places = np.arange(listed.shape[1])
    matches = mx.ones(listed.shape, mx.bool_)
    met = mx.zeros(listed.shape, mx.bool_)
    rows = np.arange(len(listed))[:, None]
    for distance in range(1, listed.shape[1] + 1):
        if not is_open.any():
            break
        wanted = listed[rows, np.maximum(places - distance, 0)[None, :]]
        at = lengths - distance  # [L]
        came = context[mx.arange(len(listed))[:, None], to_device(np.maximum(at, 0))[:, None]]
        is_over = is_open & (wanted < 0)
        met = met | (to_device(is_over) & matches)
        matches = matches & (to_device(wanted) == came) & to_device((at >= num_prompt)[:, None])
        is_open &= ~is_over
    return mx.where(met, to_device(listed), words.NONE)


def _biases(records: Int32Array, vocab_size: int) -> mx.array:
    ids = records[:, words.BIAS_IDS : words.BIAS_IDS + MAX_BIASES]
    bits = records[:, words.BIAS_VALUES : words.BIAS_VALUES + MAX_BIASES]
    found = np.zeros((len(ids), vocab_size + 1), np.float32)
    found[np.arange(len(ids))[:, None], np.where(ids < 0, vocab_size, ids)] = bits.view(np.float32)
    return to_device(found[:, :vocab_size])


def _penalised(
    values: mx.array, records: Int32Array, context: mx.array, lengths: Int32Array
) -> mx.array:
    vocab_size, first = values.shape[1], words.PRESENCE
    penalties = to_device(np.ascontiguousarray(records[:, first : first + 3]).view(np.float32))
    presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
    places = np.arange(context.shape[1])
    is_output = (places >= records[:, words.NUM_PROMPT, None]) & (places < lengths[:, None])
    rows = mx.arange(len(records))[:, None]
    tokens = mx.where(context < 0, vocab_size, context)
    counts = mx.zeros((len(records), vocab_size + 1), mx.int32)
    counts = counts.at[rows, tokens].add(to_device(is_output.astype(np.int32)))[:, :vocab_size]
    repeated = mx.where(values > 0, values / repetition, values * repetition)
    values = mx.where(_members(context, vocab_size), repeated, values)
    values = values - frequency * counts.astype(mx.float32)
    return values - presence * (counts > 0)
