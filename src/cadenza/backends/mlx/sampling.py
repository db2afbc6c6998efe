"""Sampling in MLX: the definition of `backends.xla.ops.sampling`, with the same draws.

Which parts are computed is decided on the host, where the settings are; it does not change a row's
result. Legend: L logit rows · V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cadenza.backends.mlx.arrays import to_device
from cadenza.config import MAX_LOGPROBS_BOUND
from cadenza.core.step_schema import NO_RULES, LogitInputs, StepOutput

Rows = LogitInputs[Any]
"""The settings of the logit rows, as host arrays [L]."""

_KEY_BITS = 32
_SIGN = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """A step's results on the device; the last four are None if no log probabilities are wanted."""

    tokens: mx.array  # [L]
    is_finite: mx.array  # [L]
    has_choice: mx.array  # [L]
    logprobs: mx.array | None = None  # [L]
    ranks: mx.array | None = None  # [L]
    top_ids: mx.array | None = None  # [L, K]
    top_logprobs: mx.array | None = None  # [L, K]

    def arrays(self) -> list[mx.array]:
        given = (getattr(self, name) for name in type(self).__slots__)
        return [each for each in given if each is not None]

    def read(self, count: int) -> StepOutput:
        """Waits for the results; those of the first `count` rows."""
        shape = (count, MAX_LOGPROBS_BOUND)
        return StepOutput(
            token_ids=_host(self.tokens, count, np.int32, (count,)),
            is_finite=_host(self.is_finite, count, np.bool_, (count,)),
            has_choice=_host(self.has_choice, count, np.bool_, (count,)),
            logprobs=_host(self.logprobs, count, np.float32, (count,)),
            ranks=_host(self.ranks, count, np.int32, (count,)),
            top_ids=_host(self.top_ids, count, np.int32, shape),
            top_logprobs=_host(self.top_logprobs, count, np.float32, shape),
        )


def _host(values: mx.array | None, count: int, dtype: type[Any], shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, dtype) if values is None else np.array(values)[:count].astype(dtype)


def sample_tokens(logits: mx.array, rows: Rows, ruled: mx.array | None = None) -> ChosenTokens:
    """Logits [L, V] float32 to the choice of each row.

    Tokens are chosen from `ruled` [L, V], the logits after token rules (default: `logits`); log
    probabilities and ranks are computed from `logits`. A row with a target reports that token.
    """
    choices = logits if ruled is None else ruled
    tokens = mx.argmax(choices, axis=-1).astype(mx.int32)  # ties: the lowest id
    if (rows.temperature > 0).any():
        tokens = mx.where(to_device(rows.temperature > 0), _draw(choices, rows), tokens)
    if (rows.targets >= 0).any():
        tokens = mx.where(to_device(rows.targets >= 0), to_device(rows.targets), tokens)
    has_choice = mx.any(choices > -mx.inf, axis=-1) | to_device(rows.rule_record == NO_RULES)
    is_finite = mx.all(mx.isfinite(logits), axis=-1)
    chosen = ChosenTokens(tokens=tokens, is_finite=is_finite, has_choice=has_choice)
    return _described(chosen, logits) if (rows.num_logprobs >= 0).any() else chosen


def draw_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Standard Gumbel noise [L, V]: a pure function of the row's key [L, 2] and the token id."""
    bits = mx.arange(vocab_size, dtype=mx.uint32)[None, :] * _word(0x9E3779B9)
    bits = bits ^ keys[:, :1]
    bits = (bits ^ (bits >> _word(17))) * _word(0xED5AD4BB)
    bits = (bits ^ (bits >> _word(11))) + keys[:, 1:]
    bits = bits * _word(0xAC4C1B51)
    bits = (bits ^ (bits >> _word(15))) * _word(0x31848BAB)
    bits = bits ^ (bits >> _word(14))
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _draw(logits: mx.array, rows: Rows) -> mx.array:
    """Draws a token for each row [L]; the token of a row at temperature 0 is arbitrary."""
    temperature = np.where(rows.temperature > 0, rows.temperature, 1).astype(np.float32)
    scaled = logits / to_device(temperature)[:, None]  # [L, V]
    noisy = scaled + draw_noise(to_device(rows.keys), logits.shape[1])
    is_filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.top_n_sigma > 0)
    if is_filtered.any():
        noisy = mx.where(_kept(scaled, rows), noisy, -mx.inf)
    return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _kept(scaled: mx.array, rows: Rows) -> mx.array:
    """The tokens kept by min-p and top-n-sigma, then top-k, then top-p: [L, V]."""
    order, vocab_size = _ordered(scaled), scaled.shape[1]
    maximum = mx.max(scaled, axis=-1, keepdims=True)
    kept = scaled >= maximum + mx.log(to_device(rows.min_p))[:, None]
    n = to_device(rows.top_n_sigma)[:, None]
    kept = kept & ((scaled >= maximum - n * _deviation(scaled, maximum)) | (n <= 0))
    top_k = np.where(rows.top_k > 0, np.minimum(rows.top_k, vocab_size), vocab_size)
    floor_k = _highest_floor(order, kept.astype(mx.float32), to_device(top_k.astype(np.float32)))
    kept = kept & (order >= floor_k[:, None])
    mass = mx.where(kept, mx.exp(scaled - maximum), 0.0)
    floor_p = _highest_floor(order, mass, to_device(rows.top_p) * mx.sum(mass, axis=-1))
    return kept & ((order >= floor_p[:, None]) | to_device(rows.top_p >= 1)[:, None])


def _deviation(scaled: mx.array, maximum: mx.array) -> mx.array:
    """The standard deviation of each row's logits that are not banned: [L, 1]."""
    is_allowed = scaled > -mx.inf
    distance = mx.where(is_allowed, maximum - scaled, 0.0)
    largest = mx.max(distance, axis=-1, keepdims=True)
    units = distance / mx.where(largest > 0, largest, 1.0)
    count = mx.maximum(mx.sum(is_allowed, axis=-1, keepdims=True), 1)
    mean = mx.sum(units, axis=-1, keepdims=True) / count
    squares = mx.where(is_allowed, (units - mean) ** 2, 0.0)
    variance = mx.sum(squares, axis=-1, keepdims=True) / count
    return mx.where(mx.isfinite(largest), largest * mx.sqrt(variance), mx.inf)


def _ordered(values: mx.array) -> mx.array:
    """uint32 keys in the order of the float32 values; 0.0 and -0.0 have the same key."""
    bits = mx.where(values == 0, 0.0, values).view(mx.uint32)
    return mx.where(bits >= _word(_SIGN), ~bits, bits | _word(_SIGN))


def _highest_floor(order: mx.array, mass: mx.array, wanted: mx.array) -> mx.array:
    """The highest floor [L] such that the mass [L, V] at or above it reaches `wanted` [L]."""
    floor = mx.zeros(len(order), mx.uint32)
    for index in range(_KEY_BITS):
        candidate = floor | _word(_SIGN >> index)
        above = mx.sum(mx.where(order >= candidate[:, None], mass, 0.0), axis=-1)
        floor = mx.where(above >= wanted, candidate, floor)
    return floor


def _described(chosen: ChosenTokens, logits: mx.array) -> ChosenTokens:
    """The choices with log probability and rank, and the tokens with the largest logits."""
    maximum = mx.max(logits, axis=-1, keepdims=True)
    log_total = mx.log(mx.sum(mx.exp(logits - maximum), axis=-1, keepdims=True)) + maximum
    own = mx.take_along_axis(logits, chosen.tokens[:, None], axis=1)  # [L, 1]
    top_ids, top_logits = _top(logits)
    return ChosenTokens(
        tokens=chosen.tokens,
        is_finite=chosen.is_finite,
        has_choice=chosen.has_choice,
        logprobs=(own - log_total)[:, 0],
        ranks=1 + mx.sum((logits > own).astype(mx.int32), axis=-1),
        top_ids=top_ids,
        top_logprobs=top_logits - log_total,
    )


def _top(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Ids and logits of the largest logits, descending, ties by id: [L, K] each."""
    tokens = mx.arange(logits.shape[1])[None, :]
    ids: list[mx.array] = []
    values: list[mx.array] = []
    rest = logits
    for _ in range(MAX_LOGPROBS_BOUND):
        best = mx.argmax(rest, axis=-1, keepdims=True).astype(mx.int32)
        ids.append(best)
        values.append(mx.take_along_axis(rest, best, axis=1))
        rest = mx.where(tokens == best, -mx.inf, rest)
    return mx.concatenate(ids, axis=1), mx.concatenate(values, axis=1)


def _word(value: int) -> mx.array:
    return mx.array(value, mx.uint32)
