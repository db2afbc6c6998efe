"""A small coverage-guided fuzzer for readers of bytes: seeded, and replayed by its seed alone.

Owns the mutations and the guidance: an input that takes a new step from one line to another, in
the watched files, becomes a parent of further inputs. Knows no format but by its `Grammar`.
Invariant: the inputs follow from the seed and the watched code, whatever the time.
"""

import random
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

Target = Callable[[bytes], object]
Edge = tuple[str, int, int]

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    (1 << 63) - 1,
    1 << 64,
)
MAX_INPUT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Words of the format, changes that keep its form, and what makes an input whole again."""

    words: tuple[bytes, ...]
    alter: Callable[[random.Random, bytes], bytes]
    mend: Callable[[bytes], bytes]


@dataclass(slots=True, eq=False)
class Fuzz:
    """`target` must return or raise one of `allowed`; anything else is a finding."""

    target: Target
    seeds: list[bytes]
    grammar: Grammar
    watched: Collection[str]
    allowed: type[Exception]
    seed: int
    edges: set[Edge] = field(default_factory=set)
    num_runs: int = 0

    def run(self, *, max_runs: int | None = None, max_seconds: float | None = None) -> str | None:
        """A finding with the way to see it again, or `None`."""
        draw = random.Random(self.seed)
        corpus, accepted = list(self.seeds), list(self.seeds)
        deadline = time.monotonic() + (max_seconds or float("inf"))
        while self.num_runs < (max_runs or sys.maxsize) and time.monotonic() < deadline:
            is_seed = self.num_runs < len(self.seeds)
            data = corpus[self.num_runs] if is_seed else self._mutate(draw, corpus, accepted)
            self.num_runs += 1
            try:
                is_new, is_accepted = self._watch(data)
            except Exception as error:  # noqa: BLE001 # that is what it looks for
                return f"{error!r} in run {self.num_runs} of seed {self.seed}: {data.hex()}"
            if is_new and not is_seed:
                corpus.append(data)
                accepted += [data] if is_accepted else []
        return None

    def _watch(self, data: bytes) -> tuple[bool, bool]:
        """Runs the target: did it take a step that no input took before, and did it return?"""
        steps: set[Edge] = set()

        def watch_frame(frame: FrameType, event: str, argument: Any) -> Any:
            name = frame.f_code.co_filename
            if name not in self.watched:
                return None
            last = frame.f_code.co_firstlineno

            def watch_line(frame: FrameType, event: str, argument: Any) -> Any:
                nonlocal last
                steps.add((name, last, frame.f_lineno))
                last = frame.f_lineno
                return watch_line

            return watch_line

        is_accepted = True
        before = sys.gettrace()
        sys.settrace(watch_frame)
        try:
            self.target(data)
        except self.allowed:
            is_accepted = False
        finally:
            sys.settrace(before)
        is_new = not steps <= self.edges
        self.edges |= steps
        return is_new, is_accepted

    def _mutate(self, draw: random.Random, corpus: list[bytes], accepted: list[bytes]) -> bytes:
        """A change of an input that led somewhere new; one that was accepted leads deepest."""
        data = draw.choice(draw.choice((corpus, corpus[-32:], accepted, accepted[-8:])))
        if draw.random() < 0.5:
            return self.grammar.alter(draw, data)
        for _ in range(1 << draw.randrange(4)):
            data = draw.choice(_MUTATIONS)(draw, data, corpus, self.grammar.words)
        data = data[:MAX_INPUT]
        return self.grammar.mend(data) if draw.random() < 0.8 else data


Words = tuple[bytes, ...]


def _flip(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]


def _cut(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[last:]


def _repeat(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last] * draw.randrange(1, 4) + data[last:]


def _insert_word(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice(words) + data[place:]


def _swap_word(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    present = [word for word in words if word in data]
    if not present:
        return data
    return data.replace(draw.choice(present), draw.choice(words), draw.randrange(1, 3))


def _change_number(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    places = [place for place in range(len(data)) if data[place : place + 1].isdigit()]
    if not places:
        return data
    first = last = draw.choice(places)
    while data[last : last + 1].isdigit():
        last += 1
    number = draw.choice((*NUMBERS, int(data[first:last][:18]) + draw.choice((-1, 1, 4, 8))))
    return data[:first] + str(number).encode() + data[last:]


def _splice(draw: random.Random, data: bytes, corpus: list[bytes], words: Words) -> bytes:
    other = draw.choice(corpus)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


_MUTATIONS = (
    _flip,
    _cut,
    _repeat,
    _insert_word,
    _swap_word,
    _change_number,
    _change_number,
    _splice,
)
