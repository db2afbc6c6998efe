"""`TokenRules`: applies a row's record of rules to its logits before sampling.

In this order:
1. Banned tokens are set to -inf: those that are not allowed, those that would complete a bad word,
   and stop tokens before the minimum length.
2. Biases are added.
3. Logits of tokens in the context are divided by the repetition penalty if positive, otherwise
   multiplied by it.
4. The frequency penalty is subtracted once per occurrence of a token in the output.
5. The presence penalty is subtracted once for each token in the output.

Legend: L logit rows · V vocabulary · N positions of a context · W words (`core.token_rules`).
"""

from dataclasses import dataclass
from typing import Any

from cadenza.backends.arrays import Arrays
from cadenza.batch import token_rules as words
from cadenza.bounds import MAX_BIASES
from cadenza.request import MAX_BAD_WORD_TOKENS


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Applies a row's record of rules to its logits, in this order: bans (tokens that are not
    allowed, that would complete a bad word, and stop tokens before the minimum length); biases; the
    repetition penalty on tokens of the context; the frequency penalty for each occurrence in the
    output; the presence penalty once for each token of it."""

    arrays: Arrays

    def apply(self, logits: Any, records: Any, context: Any, lengths: Any) -> Any:
        """Applies records [L, W] to logits [L, V]. `context` [L, N] has the tokens before each
        row's position `lengths` [L], then NONE."""
        xp, vocab_size = self.arrays.xp, logits.shape[1]
        banned = self._not_allowed(records, vocab_size)
        ends = self._bad_word_ends(records, context, lengths)
        banned = banned | self._members(ends, vocab_size)
        stops = records[:, words.STOPS : words.STOPS + words.MAX_STOPS]
        is_early = (lengths < records[:, words.STOPS_FROM])[:, None]
        banned = banned | self._members(xp.where(is_early, stops, words.NONE), vocab_size)
        values = xp.where(banned, -xp.inf, logits)
        values = values + self._biases(records, vocab_size)
        return self._penalised(values, records, context, lengths)

    def _not_allowed(self, records: Any, vocab_size: int) -> Any:
        tokens = self.arrays.xp.arange(vocab_size)
        mask = records[:, words.MASK + tokens // 32] >> (tokens % 32)  # [L, V]
        return (records[:, words.HAS_MASK] > 0)[:, None] & (mask & 1 == 0)

    def _members(self, token_ids: Any, vocab_size: int) -> Any:
        xp = self.arrays.xp
        columns = xp.where(token_ids < 0, vocab_size, token_ids)
        return self.arrays.spread((len(token_ids), vocab_size), xp.bool_, columns, True)

    def _bad_word_ends(self, records: Any, context: Any, lengths: Any) -> Any:
        """The last token of each bad word whose other tokens end the output, else NONE: [L, B]."""
        xp = self.arrays.xp
        num_prompt = records[:, words.NUM_PROMPT]
        listed = records[:, words.BAD_WORDS : words.BAD_WORDS + MAX_BAD_WORD_TOKENS]  # [L, B]
        rows = xp.arange(len(listed))[:, None]
        columns = xp.arange(MAX_BAD_WORD_TOKENS)[None, :]
        following = xp.concatenate([listed[:, 1:], xp.full_like(listed[:, :1], words.NONE)], axis=1)
        is_end = (listed >= 0) & (following < 0)

        def look_back(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            distance, is_open, is_met = state
            wanted = listed[rows, xp.maximum(columns - distance, 0)]
            at = lengths - distance  # [L]
            came = context[rows, xp.maximum(at, 0)[:, None]]
            is_same = (wanted == came) & (at >= num_prompt)[:, None]
            is_over = is_open & (wanted < 0)
            return distance + 1, is_open & ~is_over & is_same, is_met | is_over

        start = (xp.array(1, xp.int32), is_end, xp.zeros_like(is_end))
        state = self.arrays.repeat_while(lambda state: xp.any(state[1]), look_back, start)
        return xp.where(state[2], listed, words.NONE)

    def _biases(self, records: Any, vocab_size: int) -> Any:
        xp = self.arrays.xp
        ids = records[:, words.BIAS_IDS : words.BIAS_IDS + MAX_BIASES]
        bits = records[:, words.BIAS_VALUES : words.BIAS_VALUES + MAX_BIASES]
        columns = xp.where(ids < 0, vocab_size, ids)
        values = bits.view(xp.float32)
        return self.arrays.spread((len(ids), vocab_size), xp.float32, columns, values)

    def _penalised(self, values: Any, records: Any, context: Any, lengths: Any) -> Any:
        xp, vocab_size, first = self.arrays.xp, values.shape[1], words.PRESENCE
        penalties = records[:, first : first + 3].view(xp.float32)
        presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
        is_output = xp.arange(context.shape[1]) >= records[:, words.NUM_PROMPT, None]
        is_output = is_output & (xp.arange(context.shape[1]) < lengths[:, None])
        columns = xp.where(context < 0, vocab_size, context)
        counts = self.arrays.spread_sum(values.shape, xp.int32, columns, is_output.astype(xp.int32))
        repeated = xp.where(values > 0, values / repetition, values * repetition)
        values = xp.where(self._members(context, vocab_size), repeated, values)
        values = values - frequency * counts.astype(xp.float32)
        return values - presence * (counts > 0)
