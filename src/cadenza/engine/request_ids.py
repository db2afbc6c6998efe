"""The ids of requests: they begin with the number of their front end, so that several front ends of
one engine tell theirs from others'."""

from collections.abc import Iterator
from itertools import count

ID_BITS = 32  # Of an id, those that count the requests of a front end; what is above is its number.

MAX_FRONT = (1 << 20) - 1  # Ids stay below 2^52, which any JSON reader keeps exact


def ids_of(front: int) -> Iterator[int]:
    return count(front << ID_BITS)


def front_of(request_id: int) -> int:
    return request_id >> ID_BITS
