"""Conversations that fit a quarter of the pool are found at each later turn, whatever came before.

On the token-storing runner, for pages and for snapshots of recurrent states.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.events import Finished, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_keys import short_keys, split_keys
from cadenza.kv.page_pool import EvictionOrder, PagePool, Reuse
from cadenza.kv.recurrent_states import snapshot_places
from cadenza.request import Request, SamplingParams
from cadenza.tenant import Tenant
from tests.engine.simulation import REAL_PARTS, Parts, make_engine
from tests.scheduler.builders import prompt_of

PAGE_SIZE = 16
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=PAGE_SIZE,
    num_pages=96,
    max_num_queued_reqs=100,
)
DEFAULT_SERVER = EngineLimits(
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=2048,
    page_size=PAGE_SIZE,
    num_pages=2048,
    max_num_queued_reqs=100,
    num_state_slots=2 * 16 + 16,
)
"""Of a hybrid model with sixteen rows."""

MOST_TOKENS = LIMITS.max_model_len - 60
NOBODY = Tenant(name="")


def request_of(prompt: tuple[int, ...], max_tokens: int, tenant: Tenant = NOBODY) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params, tenant=tenant)


def answered(
    engine: EngineCore, requests: list[Request], cancel_after: int | None = None
) -> list[tuple[tuple[int, ...], int]]:
    """What requests that come at once are answered, and the prompt tokens that were found; the
    first one is cancelled after some steps."""
    tokens = {engine.submit(request): list[int]() for request in requests}
    found = dict.fromkeys(tokens, 0)
    num_steps = 0
    while not engine.is_idle:
        if num_steps == cancel_after:
            engine.cancel(min(tokens))
        for event in engine.step():
            if isinstance(event, Token):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Finished):
                found[event.request_id] = event.num_cached_tokens
        num_steps += 1
    engine.check_invariants()
    return [(tuple(each), found[at]) for at, each in tokens.items()]


class Talk:
    """A conversation of an engine. A turn says `num_said` tokens behind all that was said and
    answered before, and is answered by `num_answered`."""

    def __init__(
        self,
        engine: EngineCore,
        seed: int,
        num_said: int,
        num_answered: int,
        tenant: Tenant = NOBODY,
    ) -> None:
        self.engine, self.seed, self.tenant = engine, seed, tenant
        self.num_said, self.num_answered = num_said, num_answered
        self.tokens: tuple[int, ...] = ()
        self.num_turns = 0

    def next_turn(self) -> tuple[int, int]:
        """The prompt tokens that were found, and those that could be: full pages of all that was
        computed."""
        known = max(0, len(self.tokens) - 1) // PAGE_SIZE * PAGE_SIZE
        self.tokens += prompt_of(self.num_said, seed=1000 * self.seed + self.num_turns)
        self.num_turns += 1
        request = request_of(self.tokens, self.num_answered, self.tenant)
        ((tokens, found),) = answered(self.engine, [request])
        self.tokens += tokens
        return found, known


def play(talks: list[Talk], num_turns: int) -> list[tuple[int, int]]:
    """In turn; what was found at each turn but the first of each."""
    turns = [talk.next_turn() for _ in range(num_turns) for talk in talks]
    return turns[len(talks) :]


def num_hits(turns: list[tuple[int, int]]) -> int:
    return sum(found == known > 0 for found, known in turns)


class PoolByClass(PagePool):
    """A negative control: what several requests have found stays, however new others are."""

    def __init__(self, num_pages: int, on_evict: object) -> None:
        super().__init__(num_pages, on_evict, order_type=ByClass)  # type: ignore[arg-type]


class ByClass(EvictionOrder):
    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        super().__init__(num_pages, reuse)
        self._most_newest = 0


def by_class(limits: EngineLimits, secret: bytes) -> KVCacheManager:
    return KVCacheManager(limits, secret, pool_type=PoolByClass)


CONTROL = Parts(kv_cache=by_class)


def behind_ended_talks(parts: Parts, num_ended: int) -> list[tuple[int, int]]:
    """The turns of three conversations behind others on the default server."""
    engine = make_engine(DEFAULT_SERVER, parts=parts)
    for seed in range(num_ended):
        play([Talk(engine, seed, 40, 30)], 3)
    return play([Talk(engine, 500 + seed, 40, 30) for seed in range(3)], 6)


def behind_prompts_asked(parts: Parts, times: int) -> list[tuple[int, int]]:
    """The turns of two conversations behind sixty prompts that were asked several times."""
    engine = make_engine(replace(LIMITS, num_pages=256, max_model_len=1024), parts=parts)
    for seed in range(60):
        for _ in range(times):
            answered(engine, [request_of(prompt_of(70, seed=seed), 8)])
    return play([Talk(engine, 500 + seed, 40, 30) for seed in range(2)], 6)


@pytest.mark.parametrize("num_ended", [16, 24])
def test_three_conversations_hit_behind_ended_ones_on_a_hybrids_default_server(
    num_ended: int,
) -> None:
    assert num_hits(behind_ended_talks(REAL_PARTS, num_ended)) == 15


@pytest.mark.parametrize("times", [2, 3, 5])
def test_two_conversations_hit_in_a_cache_full_of_prompts_asked_several_times(times: int) -> None:
    assert num_hits(behind_prompts_asked(REAL_PARTS, times)) == 10


def test_without_a_part_for_the_newest_the_conversations_would_miss() -> None:
    assert num_hits(behind_prompts_asked(CONTROL, 3)) < 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Something that a cache was used for: `count` requests that come at once, `times` in turn;
    their prompts have `num_shared` tokens in common. Each may be a turn of a conversation, and the
    first one cancelled after some steps."""

    count: int
    times: int
    num_shared: int
    num_own: int
    num_answered: int
    goes_on: bool
    cancel_after: int | None
    seed: int

    def play(self, engine: EngineCore, tenant: Tenant) -> None:
        shared = prompt_of(self.num_shared, seed=self.seed % 5)
        owns = [prompt_of(self.num_own, seed=self.seed + at) for at in range(self.count)]
        prompts = [(*shared, *own) for own in owns]
        for _ in range(self.times):
            requests = [request_of(each, self.num_answered, tenant) for each in prompts]
            answers = answered(engine, requests, self.cancel_after)
            if self.goes_on:
                pairs = zip(prompts, answers, strict=True)
                prompts = [(*prompt, *answer)[:MOST_TOKENS] for prompt, (answer, _) in pairs]


PASTS = st.lists(
    st.builds(
        Past,
        count=st.integers(1, 5),
        times=st.integers(1, 4),
        num_shared=st.sampled_from([0, 0, 16, 33, 64]),
        num_own=st.integers(1, 110),
        num_answered=st.integers(1, 24),
        goes_on=st.booleans(),
        cancel_after=st.sampled_from([None, None, 0, 1, 3]),
        seed=st.integers(1, 1 << 20),
    ),
    min_size=1,
    max_size=8,
)
GUEST = Tenant(name="guest", cache_share=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """Three conversations of `num_turns` turns."""

    num_said: int
    num_answered: int
    num_turns: int

    @property
    def num_pages(self) -> int:
        """That they fill."""
        num_tokens = (self.num_said + self.num_answered) * self.num_turns
        return 3 * -(-num_tokens // PAGE_SIZE)

    def num_states(self, interval: int) -> int:
        """Snapshots that one turn of each makes, and that it starts from."""
        size = self.num_said + self.num_answered
        most = 0
        for turn in range(self.num_turns):
            prompt, known = turn * size + self.num_said, max(0, turn * size - 1)
            known = known // PAGE_SIZE * PAGE_SIZE
            places = snapshot_places(prompt, known, page_size=PAGE_SIZE, interval=interval)
            most = max(most, len(places))
        return 3 * (most + 2)


PRESENTS = st.builds(
    Present,
    num_said=st.integers(17, 40),
    num_answered=st.integers(1, 30),
    num_turns=st.integers(2, 3),
)


@given(
    pasts=PASTS,
    present=PRESENTS,
    interval=st.sampled_from([16, 48, 512]),
    is_recurrent=st.booleans(),
    share=st.sampled_from([1.0, 0.5]),
    tenant=st.sampled_from([NOBODY, GUEST]),
)
def test_three_conversations_that_fit_a_quarter_hit_behind_any_history(
    pasts: list[Past],
    present: Present,
    interval: int,
    is_recurrent: bool,
    share: float,
    tenant: Tenant,
) -> None:
    smallest = min(share, tenant.cache_share)
    limits = replace(
        LIMITS,
        num_pages=max(LIMITS.num_pages, int(4 * present.num_pages / smallest)),
        prefix_cache_memory_share=share,
    )
    if is_recurrent:
        num_slots = max(2 * limits.max_num_seqs, 4 * present.num_states(interval))
        limits = replace(limits, num_state_slots=num_slots, state_snapshot_interval=interval)
    engine = make_engine(limits)
    cache = engine.scheduler.kv_cache.prefix_cache
    assert cache is not None
    told = cache.watch()
    for past in pasts:
        past.play(engine, tenant)
    talks = [
        Talk(engine, 10_000 + at, present.num_said, present.num_answered, tenant) for at in range(3)
    ]
    turns = play(talks, present.num_turns)
    assert [found for found, _ in turns] == [known for _, known in turns]
    keys = map(cache.key_of, cache.page_ids)
    assert sorted(split_keys(told.take().added)) == sorted(short_keys(keys))
