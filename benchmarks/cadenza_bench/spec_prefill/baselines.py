"""Ways to choose the chunks of a prompt without a draft model, at the rate of sparse prefill and
with the same forced ones. Invariant: a choice follows from the prompt's tokens alone.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cadenza.sparse_prefill import CHUNK, LAST_TOKENS, KeptTokens, SparsePrefill, num_chunks

_K1, _B = 1.2, 0.75
"""BM25's usual parameters."""

Scores = Callable[[Sequence[int]], list[float]]
"""Of the chunks of a prompt."""


def random_scores(token_ids: Sequence[int]) -> list[float]:
    """By chance, with a seed that follows from the prompt."""
    rng = random.Random(repr(tuple(token_ids)))
    return [rng.random() for _ in range(num_chunks(len(token_ids)))]


def end_scores(token_ids: Sequence[int]) -> list[float]:
    """The beginning and the end, in equal parts."""
    count = num_chunks(len(token_ids))
    return [-float(min(place, count - 1 - place)) for place in range(count)]


def bm25_scores(token_ids: Sequence[int]) -> list[float]:
    """By BM25 over tokens: each chunk is a document, the last tokens of the prompt the query."""
    chunks = [
        Counter(token_ids[start : start + CHUNK]) for start in range(0, len(token_ids), CHUNK)
    ]
    query = {*token_ids[-LAST_TOKENS:]}
    holding = Counter(token_id for chunk in chunks for token_id in chunk if token_id in query)
    mean = len(token_ids) / len(chunks)
    weights = {
        token_id: math.log(1 + (len(chunks) - number + 0.5) / (number + 0.5))
        for token_id, number in holding.items()
    }
    return [_bm25(chunk, weights, mean) for chunk in chunks]


def _bm25(chunk: Counter[int], weights: Mapping[int, float], mean: float) -> float:
    length = _K1 * (1 - _B + _B * chunk.total() / mean)
    return sum(
        weights[token_id] * chunk[token_id] * (_K1 + 1) / (chunk[token_id] + length)
        for token_id in sorted(weights.keys() & chunk.keys())
    )


BASELINES: Mapping[str, Scores] = {
    "random": random_scores,
    "first_last": end_scores,
    "bm25": bm25_scores,
}


def chosen(token_ids: Sequence[int], keep: float, scores: Scores) -> KeptTokens:
    return SparsePrefill(keep=keep).select(scores(token_ids), len(token_ids))
