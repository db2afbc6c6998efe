"""Greedy covering arrays: few rows, of a level for each factor, that contain every pair of levels
of two factors. Invariant: a pure function; every pair occurs at least as often as requested.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

Pair = tuple[int, int, int, int]
"""(factor, its level, a later factor, its level)."""

Row = tuple[int, ...]
"""One level per factor."""


def all_pairs(num_levels: Sequence[int]) -> list[Pair]:
    return [
        (left, one, right, other)
        for left, right in combinations(range(len(num_levels)), 2)
        for one in range(num_levels[left])
        for other in range(num_levels[right])
    ]


def missing_pairs(num_levels: Sequence[int], rows: Iterable[Row]) -> list[Pair]:
    found = {pair for row in rows for pair in _pairs_of(row)}
    return [pair for pair in all_pairs(num_levels) if pair not in found]


def covering_rows(num_levels: Sequence[int], *, times: int) -> tuple[Row, ...]:
    """Rows that contain every pair at least `times` times. Each starts with the pair that is
    missing most often, then adds for each factor the level whose pairs with the levels chosen so
    far are. The order of factors and levels rotates from row to row, so that ties are broken
    differently."""
    wanted = dict.fromkeys(all_pairs(num_levels), times)
    rows: list[Row] = []
    while max(wanted.values(), default=0) > 0:
        row = _next_row(num_levels, wanted, turn=len(rows))
        rows.append(row)
        for pair in _pairs_of(row):
            wanted[pair] -= 1
    return tuple(rows)


def _next_row(num_levels: Sequence[int], wanted: dict[Pair, int], turn: int) -> Row:
    left, one, right, other = max(wanted, key=lambda pair: wanted[pair])
    chosen = {left: one, right: other}
    num_factors = len(num_levels)
    for offset in range(num_factors):
        factor = (turn + offset) % num_factors
        if factor in chosen:
            continue
        wants = [_want(wanted, chosen, factor, level) for level in range(num_levels[factor])]
        turned = [(turn + step) % len(wants) for step in range(len(wants))]
        chosen[factor] = max(turned, key=wants.__getitem__)
    return tuple(chosen[factor] for factor in range(num_factors))


def _want(wanted: dict[Pair, int], chosen: dict[int, int], factor: int, level: int) -> int:
    total = 0
    for other, its_level in chosen.items():
        ordered = (factor, level, other, its_level)
        pair = ordered if factor < other else (other, its_level, factor, level)
        total += max(0, wanted[pair])
    return total


def _pairs_of(row: Row) -> list[Pair]:
    return [
        (left, row[left], right, row[right]) for left, right in combinations(range(len(row)), 2)
    ]
