"""Thousands of bodies around every numeric bound, over HTTP: 400, and the right field named."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cadenza.server.schemas.field_types import FieldType, Integer, Number
from tests.server.bodies import BODIES
from tests.server.harness import RunningServer

PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the fox"},
    "chat": {"messages": [{"role": "user", "content": "the fox"}]},
}
LAST = "temperatur"
"""Fields are checked in their order: a good one before this one is passed over."""
WRONG_TYPES = ["1", "", [], [1], {}, {"1": 1}, True, False, "NaN", "\u0661"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericField:
    """A field, or a member of one, that takes numbers."""

    endpoint: str
    name: str
    kind: Number | Integer
    is_bias: bool = False

    def body(self, value: Any) -> dict[str, Any]:
        shown = {"5": value} if self.is_bias else value
        return {**NEEDED[self.endpoint], self.name: shown, LAST: 1}


def numeric_fields() -> Iterator[NumericField]:
    for endpoint in PATHS:
        for name, field in BODIES[endpoint].fields.items():
            kind: FieldType[Any] = field.type
            if isinstance(kind, Number | Integer):
                yield NumericField(endpoint=endpoint, name=name, kind=kind)
            elif name == "logit_bias":
                bounds = Number(-100.0, 100.0)
                yield NumericField(endpoint=endpoint, name=name, kind=bounds, is_bias=True)


def values(kind: Number | Integer, source: random.Random) -> Iterator[Any]:
    """Without end: bounds and their neighbours, numbers that no type holds, and other types."""
    whole = [2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400]
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0, 0, 0.5]
    ends = [kind.low, kind.high]
    near = [end + step for end in ends for step in (-1, 0, 1)]
    next_to = [math.nextafter(float(end), to) for end in ends for to in (-math.inf, math.inf)]
    yield from [*near, *next_to, *whole, *(-each for each in whole), *odd, *WRONG_TYPES]
    while True:
        end = source.choice(ends)
        yield source.choice(
            [
                end + source.randint(-1000, 1000),
                end + source.uniform(-1, 1),
                source.randint(-(2**70), 2**70),
                source.uniform(-1e300, 1e300),
                math.nextafter(float(end), source.choice([-math.inf, math.inf])),
            ]
        )


def is_good(kind: Number | Integer, value: Any) -> bool:
    """Said again, in other words than the table's."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(kind, Integer) and value % 1:
        return False
    return not (value < kind.low or value > kind.high)


def play(server: RunningServer, num_bodies: int) -> None:
    source = random.Random(20)
    streams = [(field, values(field.kind, source)) for field in numeric_fields()]
    assert len(streams) >= 28
    counts = {"good": 0, "bad": 0}
    with server.client() as client:
        for field, stream in itertools.islice(itertools.cycle(streams), num_bodies):
            value = next(stream)
            is_ok = is_good(field.kind, value)
            counts["good" if is_ok else "bad"] += 1
            wanted = LAST if is_ok else field.name
            check(client, field, value, wanted)
    print(f"{num_bodies} bodies: {counts}")
    assert min(counts.values()) > num_bodies / 20


def check(client: httpx.Client, field: NumericField, value: Any, wanted: str) -> None:
    content = json.dumps(field.body(value)).encode()
    headers = {"content-type": "application/json"}
    answer = client.post(PATHS[field.endpoint], content=content, headers=headers)
    assert answer.status_code == 400, (field, value, answer.text)
    assert answer.json()["error"]["param"] == wanted, (field, value, answer.text)


def test_numbers_beyond_their_bounds_are_refused_by_name(bundled: RunningServer) -> None:
    play(bundled, 500)


@pytest.mark.soak
def test_thousands_of_numbers_beyond_their_bounds_are(bundled: RunningServer) -> None:
    play(bundled, 20_000)
