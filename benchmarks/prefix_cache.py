"""How much of the prompts of simulated traffic a prefix cache finds, by the order of eviction.

    python benchmarks/prefix_cache.py [--pages 512] [--states 0] [--rows 2] [--result FILE]

Plays `cache_traces` on the engine's own page pool, prefix cache and slots of states, without steps
or a clock: with Cadenza's order, the one by class and age that it had before, the least recently
used one, and the ideal, which evicts what is used last or never again. Of a model with recurrent
states the ideal has slots for all snapshots. `--result` writes a result file of docs/results.
"""

import argparse
import datetime
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path

from cache_traces import TRACES, Ask
from cadenza import Request, SamplingParams
from cadenza.batch.sequence import Sequence as Stream
from cadenza.config import EngineLimits
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_keys import Content, PageKeys
from cadenza.kv.page_pool import EvictionOrder, PageClass, PagePool, Reuse

PAGE_SIZE = 16
SECRET = b"of a simulated prefix cache"
CHUNK = 256
NEVER = 1 << 40

OnEvict = Callable[[int], None]
PoolType = Callable[[int, OnEvict], PagePool]


class LeastRecentlyUsed(EvictionOrder):
    """By the last use alone."""

    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        super().__init__(num_pages, reuse)
        self._most_newest = 0

    def add(self, page_id: int, page_class: PageClass) -> None:
        del page_class
        super().add(page_id, PageClass.SHARED)


class ByClassAndAge(EvictionOrder):
    """The lowest class first; a page falls by one class after four pools of evictions."""

    ROUNDS = 4

    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        super().__init__(num_pages, reuse)
        self._most_newest = 0
        self._max_age = self.ROUNDS * num_pages

    def _lead(self, page_class: int) -> int:
        return page_class * NEVER

    def evict(self, page_id: int) -> None:
        super().evict(page_id)
        for page_class in (PageClass.SHARED, PageClass.PROMPT, PageClass.GENERATED):
            pages = self._classes[page_class]
            while pages and self._num_evicted - next(iter(pages.values())) >= self._max_age:
                self.add(next(iter(pages)), PageClass(page_class - 1))


class PoolBefore(PagePool):
    """What a second request takes is shared; a state is neither passed nor one where prompts part,
    and what is computed again is not renewed."""

    def __init__(self, num_pages: int, on_evict: OnEvict) -> None:
        super().__init__(num_pages, on_evict, order_type=ByClassAndAge)

    def mark_cached(self, page_id: int, page_class: PageClass = PageClass.PROMPT) -> None:
        super().mark_cached(page_id, min(page_class, PageClass.PROMPT))

    def mark_found(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            if self.class_of(page_id) is not PageClass.SPARSE:
                self._pages[page_id].page_class = PageClass.SHARED

    def mark_passed(self, page_id: int) -> None:
        pass

    def renew(self, page_id: int) -> None:
        pass


class Future:
    """Which requests of a trace use a page, by its key, and how many pages are before it."""

    def __init__(self, trace: Iterable[Ask]) -> None:
        self.now = -1
        self.key_of: Callable[[int], bytes] = lambda _: b""
        self._uses: dict[bytes, list[int]] = {}
        self._depths: dict[bytes, int] = {}
        page_keys = PageKeys(page_size=PAGE_SIZE, secret=SECRET)
        for at, ask in enumerate(trace):
            keys: list[bytes] = []
            page_keys.extend(keys, Content(ask.prompt))
            for depth, key in enumerate(keys[: (len(ask.prompt) - 1) // PAGE_SIZE]):
                self._uses.setdefault(key, []).append(at)
                self._depths[key] = depth

    def next_use(self, page_id: int) -> tuple[int, int]:
        """And the page's depth; of pages that are used together the deepest can go first."""
        key = self.key_of(page_id)
        uses = self._uses.get(key, [])
        place = bisect_right(uses, self.now)
        return uses[place] if place < len(uses) else NEVER, self._depths.get(key, NEVER)


class Ideal(EvictionOrder):
    """Belady's: the page whose next use is the last goes first."""

    def __init__(self, num_pages: int, future: Future) -> None:
        super().__init__(num_pages)
        self._future = future
        self._heap: list[tuple[int, int, int, int]] = []
        self._entries: dict[int, int] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._entries

    def add(self, page_id: int, page_class: PageClass) -> None:
        del page_class
        self._num_entries += 1
        self._entries[page_id] = self._num_entries
        next_use, depth = self._future.next_use(page_id)
        heappush(self._heap, (-next_use, -depth, self._num_entries, page_id))

    def take(self, page_id: int) -> None:
        del self._entries[page_id]

    def first(self, can_go: Callable[[int], bool] | None = None) -> int | None:
        assert can_go is None, "the ideal knows no shares"
        while self._heap:
            next_use, _, entry, page_id = self._heap[0]
            if self._entries.get(page_id) != entry:
                heappop(self._heap)
            elif -next_use <= self._future.now:  # it was not found then: what is before it is gone
                heappop(self._heap)
                self.add(page_id, PageClass.PROMPT)
            else:
                return page_id
        return None


class Cache:
    """A `KVCacheManager` that at most `num_rows` requests use at a time."""

    def __init__(self, limits: EngineLimits, pool_type: PoolType) -> None:
        self._kv_cache = KVCacheManager(limits, SECRET, pool_type=pool_type)
        self._num_rows = limits.max_num_seqs
        self._open: deque[Stream] = deque()

    def key_of(self, page_id: int) -> bytes:
        assert self._kv_cache.prefix_cache is not None
        return self._kv_cache.prefix_cache.key_of(page_id)

    def play(self, trace: Sequence[Ask], future: Future | None = None) -> float:
        """The share of the prompts' tokens that is found."""
        num_found = 0
        for at, ask in enumerate(trace):
            if future is not None:
                future.now = at - 1
            if len(self._open) == self._num_rows:
                self._end_one()
            stream = _stream_of(at, ask)
            while not self._kv_cache.try_adopt(stream, self._kv_cache.find_prefix(stream)):
                self._end_one()
            if future is not None:
                future.now = at
            stream.has_started = True
            num_found += stream.num_computed_tokens
            self._compute(stream, len(ask.prompt))
            stream.token_ids += ask.answer
            last = len(stream.token_ids) - 1
            while stream.num_computed_tokens < last:
                end = (stream.num_computed_tokens // PAGE_SIZE + 1) * PAGE_SIZE
                self._compute(stream, min(end, last))
            self._open.append(stream)
        return num_found / sum(len(ask.prompt) for ask in trace)

    def _compute(self, stream: Stream, num_tokens: int) -> None:
        while (start := stream.num_computed_tokens) < num_tokens:
            end = min(num_tokens, start + CHUNK)
            while not self._kv_cache.try_grow(stream, end):
                self._end_one()
            if self._kv_cache.sequence_states is not None:
                placement = self._kv_cache.sequence_states.place(stream, start, end, 0)
                self._kv_cache.unpin((), placement.slots)
            stream.num_computed_tokens = end
        self._kv_cache.publish(stream, num_tokens)

    def _end_one(self) -> None:
        self._kv_cache.release(self._open.popleft())


def _stream_of(at: int, ask: Ask) -> Stream:
    return Stream(
        request_id=at,
        request=Request(prompt_token_ids=ask.prompt, params=SamplingParams()),
        seed=at,
        max_num_tokens=len(ask.prompt) + len(ask.answer),
        stop_token_ids=frozenset(),
        token_ids=list(ask.prompt),
    )


def limits_of(num_pages: int, num_states: int, num_rows: int) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=CHUNK,
        max_model_len=num_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_queued_reqs=100,
        num_state_slots=num_states,
    )


def ideal_of(trace: Sequence[Ask], num_pages: int, num_states: int, num_rows: int) -> float:
    future = Future(trace)
    pools: list[PagePool] = []

    def make_pool(count: int, on_evict: OnEvict) -> PagePool:
        is_first = not pools  # then come the slots of states
        pools.append(
            PagePool(
                count,
                on_evict,
                order_type=lambda num, reuse: (
                    Ideal(num, future) if is_first else LeastRecentlyUsed(num, reuse)
                ),
            )
        )
        return pools[-1]

    num_snapshots = num_states and sum(
        2 + (len(ask.prompt) + len(ask.answer)) // PAGE_SIZE for ask in trace
    )
    cache = Cache(limits_of(num_pages, num_snapshots, num_rows), make_pool)
    future.key_of = cache.key_of
    return cache.play(trace, future)


def recent_pool(num_pages: int, on_evict: OnEvict) -> PagePool:
    return PagePool(num_pages, on_evict, order_type=LeastRecentlyUsed)


POOLS: dict[str, PoolType] = {
    "Cadenza": PagePool,
    "by class and age": PoolBefore,
    "least recently used": recent_pool,
}


def shares_of(trace: Sequence[Ask], num_pages: int, num_states: int, num_rows: int) -> list[float]:
    """Of `POOLS`, and of the ideal."""
    limits = limits_of(num_pages, num_states, num_rows)
    found = [Cache(limits, pool_type).play(trace) for pool_type in POOLS.values()]
    return [*found, ideal_of(trace, num_pages, num_states, num_rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--states", type=int, default=0, help="slots of recurrent states")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the traces' names")
    parser.add_argument("--result", type=Path, default=None)
    arguments = parser.parse_args()
    names = [*POOLS, "ideal"]
    print(f"{'prompt tokens found, %':56}" + "".join(f"{name:>21}" for name in names))
    figures: list[dict[str, object]] = []
    for what, make in TRACES.items():
        if arguments.only not in what:
            continue
        trace = list(make(arguments.seed))
        found = shares_of(trace, arguments.pages, arguments.states, arguments.rows)
        shares = [round(100 * each, 1) for each in found]
        print(f"{what:56}" + "".join(f"{share:21.1f}" for share in shares), flush=True)
        figures.append(
            {
                "what": f"{what}: prompt tokens found",
                "unit": "%",
                "at": names,
                "values": {"Cadenza": shares},
            }
        )
    if arguments.result is not None:
        arguments.result.write_text(
            json.dumps(result_of(arguments, figures), indent=2) + "\n", encoding="utf-8"
        )


def result_of(arguments: argparse.Namespace, figures: list[dict[str, object]]) -> dict[str, object]:
    flags = f"--pages {arguments.pages} --states {arguments.states} --rows {arguments.rows}"
    model = "a model with recurrent states" if arguments.states else "attention"
    slots = f" and {arguments.states} slots" if arguments.states else ""
    return {
        "workload": f"a prefix cache of {arguments.pages} pages{slots}, {model}, simulated",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": {"kind": "Simulated", "cpu": "none: nothing is computed", "cores": 1},
        "conditions": f"{arguments.rows} requests at a time; by class and age: the order before",
        "engines": {
            "Cadenza": {
                "version": "no machine",
                "command": f"python benchmarks/prefix_cache.py {flags}",
            }
        },
        "figures": figures,
    }


if __name__ == "__main__":
    main()
