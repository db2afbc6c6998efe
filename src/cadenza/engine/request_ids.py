"""The ids of requests, by which several front ends of one engine tell theirs from others'.

A front end has a number, with which the ids of its requests begin. Plain functions.
"""

from collections.abc import Iterator
from itertools import count

ID_BITS = 32
"""Of an id, those that count the requests of a front end; what is above is its number."""

MAX_FRONT = (1 << 20) - 1
"""Ids stay below 2^52, which any JSON reader keeps exact."""


def ids_of(front: int) -> Iterator[int]:
    """The ids of the requests of a front end."""
    return count(front << ID_BITS)


def front_of(request_id: int) -> int:
    return request_id >> ID_BITS
