"""Tokens of a step from its logits, over an array library, JAX or MLX (`Arrays`): rules, then a
choice without sorting the vocabulary. A draw is a Gumbel maximum (Gumbel, 1954) whose noise hashes
the row's key and the token id, so it depends on the row alone. Legend: L logit rows · V vocabulary
· C columns of the result · N positions of a context · W words of a record of rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.batch import token_rules as words
from cadenza.batch.step_schema import NO_RULES, Int32Array, LogitInputs, StepOutput
from cadenza.bounds import MAX_BIASES
from cadenza.config import MAX_LOGPROBS_BOUND
from cadenza.request import MAX_BAD_WORD_TOKENS

NUM_TOP = MAX_LOGPROBS_BOUND  # most top log probabilities that a step can report (`--max-logprobs`)
COLUMN_TOKEN, COLUMN_STATE, COLUMN_LOGPROB, COLUMN_RANK, COLUMN_TOP = range(5)
# Columns of a step's result: token, row state, logprob bits, rank, top ids, top logprob bits.
NUM_COLUMNS = COLUMN_TOP + 2 * NUM_TOP

# Row states: a logit is NaN or infinite · a token was chosen · the rules allow no token.
STATE_NOT_FINITE, STATE_CHOSEN, STATE_NONE_ALLOWED = range(3)
Body = Callable[[Any, Any], Any]
Rows = LogitInputs[Any]  # the settings of the logit rows [L]
_KEY_BITS = 32
_SIGN = 1 << 31


def read_result(rows: Int32Array, hidden: npt.NDArray[np.float32]) -> StepOutput:
    top_ids, top_logprobs = np.split(rows[:, COLUMN_TOP:NUM_COLUMNS], 2, axis=1)
    return StepOutput(
        token_ids=rows[:, COLUMN_TOKEN],
        is_finite=rows[:, COLUMN_STATE] != STATE_NOT_FINITE,
        has_choice=rows[:, COLUMN_STATE] != STATE_NONE_ALLOWED,
        logprobs=rows[:, COLUMN_LOGPROB].view(np.float32),
        ranks=rows[:, COLUMN_RANK],
        top_ids=top_ids,
        top_logprobs=top_logprobs.view(np.float32),
        hidden=hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """An array library."""

    xp: Any  # `jax.numpy` or `mlx.core`
    # a setting of the rows, which may be a host array, as an array of `xp`
    on_device: Callable[[Any], Any]
    # `either(condition, then, otherwise)` calls one of the two functions
    either: Callable[[Any, Callable[[], Any], Callable[[], Any]], Any]
    # `repeat(count, body, state)` is the state after `body(index, state)` for each index
    repeat: Callable[[int, Body, Any], Any]
    # `repeat_while(condition, body, state)` likewise, while `condition(state)`. It may call `body`
    # further times: this must then leave the state as it is.
    repeat_while: Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]
    # `set_at(array, indices, values)` is the array with elements set
    set_at: Callable[[Any, Any, Any], Any]
    # `spread(shape, dtype, ids, values)` is zeros [L, V] with the values at ids [L, ·] of each row;
    # ids of V are ignored
    spread: Callable[[tuple[int, int], Any, Any, Any], Any]
    # the same with the sum of the values of equal ids
    spread_sum: Callable[[tuple[int, int], Any, Any, Any], Any]

    def word(self, value: int) -> Any:
        return self.xp.array(value, self.xp.uint32)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The choice of tokens with the arrays of `arrays`."""

    arrays: Arrays

    def choose_tokens(self, logits: Any, rows: Rows, ruled: Any = None) -> Any:
        """Logits [L, V] float32 to the step's int32 result [L, C]. Tokens are chosen from `ruled`
        [L, V] (default: `logits`); log probabilities and ranks come from `logits`. A row with a
        target reports that token."""
        xp, on_device = self.arrays.xp, self.arrays.on_device
        choices = logits if ruled is None else ruled
        greedy = xp.argmax(choices, axis=-1).astype(xp.int32)  # ties: the lowest id
        tokens = self.arrays.either(
            (rows.temperature > 0).any(),
            lambda: xp.where(on_device(rows.temperature) > 0, self._draw(choices, rows), greedy),
            lambda: greedy,
        )
        targets = on_device(rows.targets)
        tokens = xp.where(targets >= 0, targets, tokens)
        details = self.arrays.either(
            (rows.num_logprobs >= 0).any(),
            lambda: self._describe(logits, tokens),
            lambda: xp.zeros((len(logits), 2 + 2 * NUM_TOP), xp.int32),
        )
        state = self._state(logits, choices, rows)
        return xp.concatenate([tokens[:, None], state[:, None], details], axis=1)

    def token_noise(self, keys: Any, vocab_size: int) -> Any:
        """Standard Gumbel noise [L, V], a function of the row's key [L, 2] and the token id: a
        multiply-xorshift mixer, with the key's second word added midway."""
        xp, word = self.arrays.xp, self.arrays.word
        bits = xp.arange(vocab_size, dtype=xp.uint32)[None, :] * word(0x9E3779B9)
        bits = bits ^ keys[:, :1]
        bits = (bits ^ (bits >> word(17))) * word(0xED5AD4BB)
        bits = (bits ^ (bits >> word(11))) + keys[:, 1:]
        bits = bits * word(0xAC4C1B51)
        bits = (bits ^ (bits >> word(15))) * word(0x31848BAB)
        bits = bits ^ (bits >> word(14))
        uniform = xp.minimum((bits.astype(xp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
        return -xp.log(-xp.log1p(-uniform))

    def _state(self, logits: Any, choices: Any, rows: Rows) -> Any:
        xp = self.arrays.xp
        has_choice = xp.any(choices > -xp.inf, axis=-1)
        none_allowed = self.arrays.on_device(rows.rule_record != NO_RULES) & ~has_choice
        state = xp.where(none_allowed, STATE_NONE_ALLOWED, STATE_CHOSEN)
        is_finite = xp.all(xp.isfinite(logits), axis=-1)
        return xp.where(is_finite, state, STATE_NOT_FINITE).astype(xp.int32)

    def _draw(self, logits: Any, rows: Rows) -> Any:
        # The token of a row at temperature 0 is arbitrary.
        xp, temperature = self.arrays.xp, self.arrays.on_device(rows.temperature)
        scaled = logits / xp.where(temperature > 0, temperature, 1.0)[:, None]  # [L, V]
        has_filters = (
            (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.top_n_sigma > 0)
        )
        kept = self.arrays.either(
            has_filters.any(),
            lambda: self._kept(scaled, rows),
            lambda: xp.ones(scaled.shape, xp.bool_),
        )
        noisy = scaled + self.token_noise(self.arrays.on_device(rows.keys), logits.shape[1])
        return xp.argmax(xp.where(kept, noisy, -xp.inf), axis=-1).astype(xp.int32)

    def _kept(self, scaled: Any, rows: Rows) -> Any:
        # By min-p and top-n-sigma, then top-k, then top-p; equal logits stay together.
        xp, on_device = self.arrays.xp, self.arrays.on_device
        order, vocab_size = self._ordered(scaled), scaled.shape[1]
        maximum = xp.max(scaled, axis=-1, keepdims=True)
        kept = scaled >= maximum + xp.log(on_device(rows.min_p))[:, None]
        n = on_device(rows.top_n_sigma)[:, None]
        kept = kept & ((scaled >= maximum - n * self._deviation(scaled, maximum)) | (n <= 0))
        top_k, top_p = on_device(rows.top_k), on_device(rows.top_p)
        top_k = xp.where(top_k > 0, xp.minimum(top_k, vocab_size), vocab_size)
        floor_k = self._highest_floor(order, kept.astype(xp.float32), top_k.astype(xp.float32))
        kept = kept & (order >= floor_k[:, None])
        mass = xp.where(kept, xp.exp(scaled - maximum), 0.0)
        floor_p = self._highest_floor(order, mass, top_p * xp.sum(mass, axis=-1))
        return kept & ((order >= floor_p[:, None]) | (top_p >= 1)[:, None])

    def _deviation(self, scaled: Any, maximum: Any) -> Any:
        # Of logits that are not banned; distances from the maximum, scaled so that squares do not
        # overflow.
        xp = self.arrays.xp
        is_allowed = scaled > -xp.inf
        distance = xp.where(is_allowed, maximum - scaled, 0.0)
        largest = xp.max(distance, axis=-1, keepdims=True)
        units = distance / xp.where(largest > 0, largest, 1.0)
        count = xp.maximum(xp.sum(is_allowed, axis=-1, keepdims=True), 1)
        mean = xp.sum(units, axis=-1, keepdims=True) / count
        squares = xp.where(is_allowed, (units - mean) ** 2, 0.0)
        variance = xp.sum(squares, axis=-1, keepdims=True) / count
        return xp.where(xp.isfinite(largest), largest * xp.sqrt(variance), xp.inf)

    def _ordered(self, values: Any) -> Any:
        # uint32 keys in the order of the float32 values; 0.0 and -0.0 have the same key.
        xp, sign = self.arrays.xp, self.arrays.word(_SIGN)
        bits = xp.where(values == 0, 0.0, values).view(xp.uint32)
        return xp.where(bits >= sign, ~bits, bits | sign)

    def _highest_floor(self, order: Any, mass: Any, wanted: Any) -> Any:
        """The highest floor [L] such that the mass [L, V] at or above it reaches `wanted` [L]."""
        xp = self.arrays.xp

        def try_bit(index: Any, floor: Any) -> Any:
            candidate = floor | (self.arrays.word(_SIGN) >> index.astype(xp.uint32))
            above = xp.sum(xp.where(order >= candidate[:, None], mass, 0.0), axis=-1)
            return xp.where(above >= wanted, candidate, floor)

        return self.arrays.repeat(_KEY_BITS, try_bit, xp.zeros(len(order), xp.uint32))

    def _describe(self, logits: Any, tokens: Any) -> Any:
        xp = self.arrays.xp
        maximum = xp.max(logits, axis=-1, keepdims=True)
        log_total = xp.log(xp.sum(xp.exp(logits - maximum), axis=-1, keepdims=True)) + maximum
        chosen = xp.take_along_axis(logits, tokens[:, None], axis=1)  # [L, 1]
        rank = 1 + xp.sum((logits > chosen).astype(xp.int32), axis=-1)
        top_ids, top_logits = self._top(logits)
        logprobs = (chosen - log_total).view(xp.int32)
        top_logprobs = (top_logits - log_total).view(xp.int32)
        return xp.concatenate([logprobs, rank[:, None], top_ids, top_logprobs], axis=1)

    def _top(self, logits: Any) -> tuple[Any, Any]:
        # Descending, ties by id.
        xp, set_at = self.arrays.xp, self.arrays.set_at
        rows = xp.arange(len(logits))

        def take(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            rest, ids, values = state
            best = xp.argmax(rest, axis=-1).astype(xp.int32)
            ids = set_at(ids, (slice(None), index), best)
            values = set_at(values, (slice(None), index), rest[rows, best])
            return set_at(rest, (rows, best), -xp.inf), ids, values

        ids = xp.zeros((len(logits), NUM_TOP), xp.int32)
        values = xp.zeros((len(logits), NUM_TOP), xp.float32)
        _, ids, values = self.arrays.repeat(NUM_TOP, take, (logits, ids, values))
        return ids, values


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
