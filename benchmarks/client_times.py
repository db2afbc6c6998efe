"""When clients see the tokens of a simulated engine, known from loads of a real server.

A `ClientLoad` is a closed loop: each client sends its next request when its last one is done.
It says how long a step takes while that many requests are open, with all work of the host (HTTP,
the clients, whatever shares the cores), and how far times scatter around that: in what chunks
tokens come, and how late the first one is. Owns what is learned from such loads and its replay.
Invariant: a replay is a function of its loads, its tokens and the seed.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cadenza.bench.serve_figures import CompletedRequest, Outcome


@dataclass(frozen=True, slots=True)
class SeenChunk:
    """Tokens that came together, and the time since the chunk before, as a multiple of what these
    tokens take on average."""

    num_tokens: int
    stretch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    """What was seen with `num_clients` requests open.

    Args:
        step_s: from token to token of a stream, on average.
        chunks: all but the first of each stream.
        firsts_s: each request's time to its first chunk.
    """

    num_clients: int
    step_s: float
    chunks: tuple[SeenChunk, ...]
    firsts_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenTime:
    """When a simulated engine gave a token, and how many requests were open then."""

    at_s: float
    num_open: int


def client_load(num_clients: int, outcomes: Sequence[Outcome]) -> ClientLoad:
    """What requests saw that asked for the ids of tokens; some have more than one chunk."""
    answers = [each for each in outcomes if isinstance(each, CompletedRequest)]
    gaps = [
        (later_s - earlier_s, count)
        for each in answers
        for (earlier_s, later_s), count in zip(
            pairwise(each.content_s), each.num_content_tokens[1:], strict=True
        )
    ]
    step_s = math.fsum(gap_s for gap_s, _ in gaps) / sum(count for _, count in gaps)
    return ClientLoad(
        num_clients=num_clients,
        step_s=step_s,
        chunks=tuple(SeenChunk(count, gap_s / (count * step_s)) for gap_s, count in gaps),
        firsts_s=tuple(each.content_s[0] - each.sent_s for each in answers if each.content_s),
    )


def steady(outcomes: Sequence[Outcome], num_clients: int) -> list[Outcome]:
    """The requests of a closed loop during which all clients had one open: without each client's
    first, since these come all at once, and without those that end when no more are sent."""
    ordered = sorted(outcomes, key=lambda each: each.sent_s)
    last_sent_s = ordered[-1].sent_s
    return [each for each in ordered[num_clients:] if each.end_s <= last_sent_s]


class StepTimes:
    """Milliseconds of a step: of its rows as in the loads, and `token_ms` for each prompt token.

    Between two loads it is on the line between them; beyond the largest one, on its last line.
    """

    def __init__(self, loads: Sequence[ClientLoad], token_ms: float) -> None:
        ordered = sorted(loads, key=lambda load: load.num_clients)
        self._rows = [load.num_clients for load in ordered]
        self._row_ms = [1000 * load.step_s for load in ordered]
        self._token_ms = token_ms
        self._more_ms = 0.0
        if len(ordered) > 1:
            more_ms = self._row_ms[-1] - self._row_ms[-2]
            self._more_ms = max(0.0, more_ms / (self._rows[-1] - self._rows[-2]))

    def predict_ms(self, num_rows: int, num_prompt_tokens: int) -> float:
        beyond = max(0, num_rows - self._rows[-1])
        of_rows = float(np.interp(num_rows, self._rows, self._row_ms))
        return of_rows + beyond * self._more_ms + num_prompt_tokens * self._token_ms


class ClientTimes:
    """Replays what the loads saw on the tokens of a simulation.

    Args:
        delays_s: for each load, what a first chunk took beyond the simulation of the same load.
    """

    def __init__(
        self, loads: Sequence[ClientLoad], delays_s: Sequence[Sequence[float]], seed: int
    ) -> None:
        self._loads = loads
        self._delays_s = delays_s
        self._rng = random.Random(f"client times {seed}")

    def delay_s(self, num_open: int) -> float:
        """Of a request on its way, while `num_open` are open."""
        return max(0.0, self._rng.choice(self._delays_s[self._nearest(num_open)]))

    def gaps_s(self, tokens: Sequence[TokenTime]) -> list[float]:
        """The times between chunks; the first token is a chunk of its own."""
        gaps_s: list[float] = []
        last = 0
        while last < len(tokens) - 1:
            load = self._loads[self._nearest(tokens[last].num_open)]
            chunk = self._rng.choice(load.chunks)
            end = min(len(tokens) - 1, last + chunk.num_tokens)
            gaps_s.append((tokens[end].at_s - tokens[last].at_s) * chunk.stretch)
            last = end
        return gaps_s

    def _nearest(self, num_open: int) -> int:
        """The load whose number of clients is nearest, by ratio."""

        def distance(index: int) -> float:
            return abs(math.log(max(1, num_open) / self._loads[index].num_clients))

        return min(range(len(self._loads)), key=distance)
