"""Conversations of several turns, and how they are split among simulated replicas.

A session sends its next turn some time after the last answer, with everything before it: what it
said, and the tokens that it was answered. All begin with one of a few system prompts. The rules
beside Cadenza's router have its interface, so that a simulation runs each over the same engines.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from cadenza import Finished, Request, SamplingParams, Token
from cadenza.cluster.router import Route, Router
from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.route_report import RouteReport
from cadenza_bench.simulate.device import (
    SimulatedClock,
    SimulatedGroup,
    SimulatedReplica,
    SimulatedServer,
    make_simulated_core,
)

VOCAB_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How sessions talk: lengths in tokens, times in seconds."""

    num_sessions: int = 64
    num_turns: int = 8
    num_systems: int = 4
    system_len: int = 192
    said_lens: tuple[int, int] = (16, 96)
    answer_lens: tuple[int, int] = (16, 64)
    starts_within_s: float = 10.0
    mean_pause_s: float = 4.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A conversation; `prompt` is that of its next turn."""

    place: int
    at_s: float
    prompt: list[int]
    turns: Iterator[tuple[list[int], int, float]]
    max_tokens: int = 0
    pause_s: float = 0.0

    def next_turn(self) -> bool:
        """Says something more; False if the conversation has ended."""
        said, self.max_tokens, self.pause_s = next(self.turns, ([], 0, 0.0))
        self.prompt += said
        return bool(self.max_tokens)


def sessions_of(talk: Talk) -> list[Session]:
    """In their first turn."""
    rng = random.Random(f"sessions {talk.seed}")
    systems = [_tokens(rng, talk.system_len) for _ in range(talk.num_systems)]
    found: list[Session] = []
    for place in range(talk.num_sessions):
        turns = [
            (
                _tokens(rng, rng.randint(*talk.said_lens)),
                rng.randint(*talk.answer_lens),
                rng.expovariate(1 / talk.mean_pause_s),
            )
            for _ in range(talk.num_turns)
        ]
        at_s = rng.uniform(0, talk.starts_within_s)
        found.append(Session(place, at_s, [*rng.choice(systems)], iter(turns)))
        found[-1].next_turn()
    return found


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(2, VOCAB_SIZE), k=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Times to the first token in ascending order, and what of the prompts was found cached."""

    ttfts_s: Sequence[float]
    hit_rate: float

    def quantile_s(self, share: float) -> float:
        return self.ttfts_s[min(len(self.ttfts_s) - 1, int(share * len(self.ttfts_s)))]


def simulate_sessions(
    server: SimulatedServer, talk: Talk, num_replicas: int, router: Router | None
) -> Found:
    """Plays the sessions on simulated replicas; without a router Cadenza's own."""
    replicas = [_replica(server) for _ in range(num_replicas)]
    group = SimulatedGroup(replicas, router)
    sessions = sessions_of(talk)
    coming = [(each.at_s, each.place) for each in sessions]
    heapify(coming)
    open_turns: dict[tuple[int, int], Session] = {}
    ttfts_s: list[float] = []
    while True:
        busy = [each for each in replicas if not each.core.is_idle]
        first = min(busy, key=lambda each: each.due_s, default=None)
        if coming and (first is None or coming[0][0] <= first.due_s):
            at_s, place = heappop(coming)
            session = sessions[place]
            session.at_s = at_s
            open_turns[group.submit(_request_of(session), at_s)] = session
            continue
        if first is None:
            break
        first.clock.now_s = first.due_s
        for event in first.core.step():
            session = open_turns.get((first.place, event.request_id))
            if isinstance(event, Token) and session is not None:
                if not event.index:
                    ttfts_s.append(first.clock.now_s - session.at_s)
                session.prompt.append(event.token_id)
            elif isinstance(event, Finished) and session is not None:
                del open_turns[first.place, event.request_id]
                pause_s = session.pause_s
                if session.next_turn():
                    heappush(coming, (first.clock.now_s + pause_s, session.place))
        group.stepped(first.place)
    counts = [each.core.scheduler.prefix_counts for each in replicas]
    num_hits = sum(each.num_hits for each in counts)
    num_asked = sum(each.num_queries for each in counts)
    return Found(ttfts_s=sorted(ttfts_s), hit_rate=num_hits / num_asked)


def _replica(server: SimulatedServer) -> SimulatedReplica:
    clock = SimulatedClock()
    return SimulatedReplica(make_simulated_core(server, "fcfs", clock), clock)


def _request_of(session: Session) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=session.max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=tuple(session.prompt), params=params)


class Rule(Router):
    """A router that needs no reports."""

    def __init__(self) -> None:
        super().__init__(b"of a rule")

    def take(self, place: int, report: RouteReport, now_s: float) -> None:
        """What replicas report is not looked at."""

    def sent(self, route: Route, request_id: int, now_s: float) -> None:
        """Is noted where it is chosen."""


class InTurns(Rule):
    """Round robin."""

    def __init__(self) -> None:
        super().__init__()
        self._num_chosen = 0

    def choose(
        self, request: Request, loads: Mapping[int, EngineLoad], limits: EngineLimits, now_s: float
    ) -> Route:
        del limits, now_s
        self._num_chosen += 1
        return _to([*loads][self._num_chosen % len(loads)], request)


class FewestOpen(Rule):
    """The replica with the fewest open requests."""

    def choose(
        self, request: Request, loads: Mapping[int, EngineLoad], limits: EngineLimits, now_s: float
    ) -> Route:
        del limits, now_s
        return _to(min(loads, key=lambda place: loads[place].num_open), request)


class IdealSplit(Rule):
    """Each session stays where it began, and each replica has as many; by what a request begins
    with behind its system prompt, which no router could know to be a session."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._home = {
            tuple(each.prompt[: talk.system_len + talk.said_lens[0]]): each.place
            for each in sessions_of(talk)
        }
        self._begins = talk.system_len + talk.said_lens[0]

    def choose(
        self, request: Request, loads: Mapping[int, EngineLoad], limits: EngineLimits, now_s: float
    ) -> Route:
        del limits, now_s
        session = self._home[request.prompt_token_ids[: self._begins]]
        return _to(session % len(loads), request)


@dataclass(slots=True, eq=False)
class _Tree:
    """What was sent to a replica, as prefixes; nothing is ever removed."""

    prefixes: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def num_matched(self, blocks: Sequence[tuple[int, ...]]) -> int:
        return sum(1 for each in blocks if each in self.prefixes)


class RayPrefixRule(Rule):
    """The rule of Ray Serve LLM's router by prefixes, as its documentation has it.

    Where the longest queue is above the shortest by more than `imbalanced_threshold`, the better of
    two replicas by chance. Else the one to which most of the prompt was sent before, if that is at
    least a tenth of it, and otherwise the one to which least was sent in all. A prompt is compared
    with what was sent, in characters there, here in blocks of four tokens; what replicas still hold
    is not known, and answers are not seen.
    """

    BLOCK = 4
    MATCH_RATE_THRESHOLD = 0.1

    def __init__(self, imbalanced_threshold: float) -> None:
        super().__init__()
        self._imbalanced_threshold = imbalanced_threshold
        self._trees: dict[int, _Tree] = {}
        self._rng = random.Random(0)

    def choose(
        self, request: Request, loads: Mapping[int, EngineLoad], limits: EngineLimits, now_s: float
    ) -> Route:
        del limits, now_s
        blocks = self._blocks(request.prompt_token_ids)
        chosen = self._chosen(blocks, loads)
        self._trees.setdefault(chosen, _Tree()).prefixes.update(blocks)
        return _to(chosen, request)

    def _blocks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.BLOCK, len(tokens) + 1, self.BLOCK)]

    def _chosen(self, blocks: Sequence[tuple[int, ...]], loads: Mapping[int, EngineLoad]) -> int:
        opens = {place: load.num_open for place, load in loads.items()}
        if max(opens.values()) - min(opens.values()) > self._imbalanced_threshold:
            return self._of_two([*loads], opens)
        trees = {place: self._trees.setdefault(place, _Tree()) for place in loads}
        matched = {place: tree.num_matched(blocks) for place, tree in trees.items()}
        most = max(matched.values())
        if most < self.MATCH_RATE_THRESHOLD * len(blocks):
            least = min(len(tree.prefixes) for tree in trees.values())
            return self._of_two([at for at in loads if len(trees[at].prefixes) == least], opens)
        return self._of_two([place for place in loads if matched[place] == most], opens)

    def _of_two(self, places: Sequence[int], opens: Mapping[int, int]) -> int:
        pair = self._rng.sample(places, min(2, len(places)))
        return min(pair, key=lambda place: opens[place])


def _to(place: int, request: Request) -> Route:
    return Route(place, (), len(request.prompt_token_ids))
