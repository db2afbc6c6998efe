"""`StoredPages`: `core.kv_cache_manager.PageStore` over a folder. Pages are copied on the engine's
thread, between steps. A state's snapshot is a file under a key that follows from its page's; of a
model with states no more pages are read than have one. A sequence waits `MAX_READ_WAIT_S` at most;
a page or snapshot enters the cache only if its tokens are the sequence's."""

import hashlib
import logging
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from cadenza.backends.base import PageCopier, StateCopier
from cadenza.batch.sequence import Sequence, SequenceStatus
from cadenza.engine.page_folder import PageFolder, StoredMiss
from cadenza.engine.page_traffic import PageRead, PageTraffic
from cadenza.figures import Figure
from cadenza.kv.kv_cache_manager import KVCacheManager, MissingPages

logger = logging.getLogger(__name__)

# Longest wait of a sequence for pages. Steps are not made meanwhile, so that it has to be well
# below the time after which an engine counts as hung.
MAX_READ_WAIT_S = 1.0

MAX_STALLS = 2  # After so many late reads in a row that brought no page, nothing is read any more.

# Published pages that may wait for being copied; the oldest of more are not stored.
MAX_BACKLOG = 1 << 14

MAX_STATE_BACKLOG = 64  # The same of snapshots

PAGES_PER_STEP = 16  # Pages copied from the device between two steps, beside one snapshot

WAIT_S = 0.01  # Longest wait of an engine that has nothing else to do

CLOSE_WITHIN_S = 5.0  # Longest time for writing what is left when an engine is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPageCounts:
    """Pages and bytes that were read and written, and pages that were not there or not usable."""

    num_read: int = 0
    num_read_bytes: int = 0
    num_written: int = 0
    num_written_bytes: int = 0
    misses: dict[StoredMiss, int] = field(
        default_factory=lambda: {"absent": 0, "damaged": 0, "late": 0}
    )


STORED_PAGE_FIGURES: tuple[Figure[StoredPageCounts], ...] = (
    Figure(
        "prefix_cache_disk_pages_read",
        "KV pages that came from the disk.",
        lambda counts: counts.num_read,
    ),
    Figure(
        "prefix_cache_disk_page_bytes_read",
        "Bytes of KV pages that came from the disk.",
        lambda counts: counts.num_read_bytes,
    ),
    Figure(
        "prefix_cache_disk_pages_written",
        "KV pages that went to the disk.",
        lambda counts: counts.num_written,
    ),
    Figure(
        "prefix_cache_disk_page_bytes_written",
        "Bytes of KV pages that went to the disk.",
        lambda counts: counts.num_written_bytes,
    ),
    Figure(
        "prefix_cache_disk_misses",
        "KV pages looked for on the disk and not taken.",
        lambda counts: {str(reason): count for reason, count in counts.misses.items()},
        ("reason",),
    ),
)


@dataclass(slots=True, eq=False)
class _Wait:
    """Its own read brings the pages after the first `num_before`; with `num_state_pages`, first the
    snapshot after so many."""

    since_s: float
    read: PageRead
    is_own: bool
    num_before: int
    num_state_pages: int | None = None
    state: bytes | None = None
    num_taken: int = 0
    has_seen_end: bool = False

    @property
    def lacks_state(self) -> bool:
        return self.num_state_pages is not None and self.state is None


class StoredPages:
    """Between `runner`'s pages, of which `kv_cache` knows the keys, and `folder`."""

    def __init__(self, runner: PageCopier, kv_cache: KVCacheManager, folder: PageFolder) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._folder = folder
        self._waits: dict[Sequence, _Wait] = {}
        self._backlog: OrderedDict[bytes, int] = OrderedDict()
        self._state_backlog: OrderedDict[bytes, int] = OrderedDict()
        self._is_off = self._has_noted_size = False
        self._num_stalls = 0
        self._num_read = self._num_read_bytes = 0
        self._traffic = PageTraffic(folder)
        # Of an engine that is dropped and not closed.
        weakref.finalize(self, self._traffic.stop).atexit = False
        kv_cache.page_store = self

    @property
    def is_busy(self) -> bool:
        return not self._has_ended and bool(self._has_backlog or self._waits)

    def is_awaited(self, now_s: float) -> bool:
        """Whether a sequence waits for a read that had not ended when last asked."""
        return any(
            not each.has_seen_end and now_s - each.since_s <= MAX_READ_WAIT_S
            for each in self._waits.values()
        )

    @property
    def _has_backlog(self) -> bool:
        return bool(self._backlog or self._state_backlog)

    @property
    def counts(self) -> StoredPageCounts:
        traffic = self._traffic
        return StoredPageCounts(
            num_read=self._num_read,
            num_read_bytes=self._num_read_bytes,
            num_written=traffic.num_written,
            num_written_bytes=traffic.num_written_bytes,
            misses=dict(traffic.misses),
        )

    @property
    def _has_ended(self) -> bool:
        return self._is_off or self._traffic.is_off

    def is_reading(
        self, sequence: Sequence, now_s: float, missing: Callable[[], MissingPages]
    ) -> bool:
        if self._has_ended or self._num_stalls >= MAX_STALLS:
            return False
        wait = self._waits.get(sequence)
        if wait is None:
            wait = self._start(sequence, now_s, missing)
        elif not wait.read.is_open and (not wait.is_own or wait.lacks_state):
            # What it lacks by now, or a shorter prefix: the snapshot of this one cannot be used.
            wait.has_seen_end = True
            if now_s - wait.since_s <= MAX_READ_WAIT_S:
                wait = self._start(sequence, wait.since_s, missing)
        if wait is None:
            return False
        if wait.read.is_open and now_s - wait.since_s > MAX_READ_WAIT_S:
            self._give_up(wait)
            return False
        wait.has_seen_end = not wait.read.is_open
        return wait.read.is_open

    def keep(self, key: bytes, page_id: int) -> None:
        if self._has_ended:
            return
        if key in self._folder:
            self._traffic.touch(key)
            return
        self._backlog[key] = page_id
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.popitem(last=False)

    def keep_state(self, key: bytes, slot: int) -> None:
        if self._has_ended:
            return
        if state_key(key) in self._folder:
            self._traffic.touch(state_key(key))
            return
        self._state_backlog[key] = slot
        if len(self._state_backlog) > MAX_STATE_BACKLOG:
            self._state_backlog.popitem(last=False)

    def advance(self) -> None:
        """Between two steps."""
        if self._is_off:
            return
        try:
            for sequence, wait in list(self._waits.items()):
                self._take(sequence, wait)
            if self._backlog and self._traffic.has_room:
                self._copy_published()
            if self._state_backlog and self._traffic.has_room:
                self._copy_state()
        except Exception:
            logger.exception("the prefix cache on disk is off: pages could not be copied")
            self._turn_off()
        if self._has_ended:
            self._turn_off()

    def wait(self) -> bool:
        """False at once if there is something to do."""
        if self._has_backlog and self._traffic.has_room:
            return False
        unseen = [each.read for each in self._waits.values() if not each.has_seen_end]
        return self._traffic.wait(WAIT_S, *unseen)

    def close(self) -> None:
        """Within a bounded time."""
        self._kv_cache.page_store = None
        end_s = time.monotonic() + CLOSE_WITHIN_S
        while self._has_backlog and not self._has_ended and time.monotonic() < end_s:
            self.advance()
            self.wait()
        self._traffic.stop()
        self._traffic.join(max(0.0, end_s - time.monotonic()))

    def _start(
        self, sequence: Sequence, since_s: float, missing: Callable[[], MissingPages]
    ) -> _Wait | None:
        lacks = missing()
        num_state_pages, keys = None, lacks.keys
        if self._kv_cache.states is not None:
            num_state_pages, keys = self._longest_state(lacks)
        if not keys:
            return None
        others = (each.read for each in self._waits.values() if each.is_own)
        found = next((each for each in others if each.brings(keys[0])), None)
        read = found or self._traffic.read(keys)
        wait = _Wait(
            since_s,
            read,
            is_own=found is None,
            num_before=lacks.num_before,
            num_state_pages=num_state_pages,
        )
        self._waits[sequence] = wait
        return wait

    def _longest_state(self, lacks: MissingPages) -> tuple[int | None, list[bytes]]:
        """The most pages after which the folder has a snapshot, and the keys to read for it.
        Without one no page is of use."""
        keys = [*lacks.bare_keys, *lacks.keys]
        first = lacks.num_before - len(lacks.bare_keys)
        for count in range(len(keys), 0, -1):
            if state_key(keys[count - 1]) in self._folder:
                pages = keys[len(lacks.bare_keys) : count]
                return first + count, [state_key(keys[count - 1]), *pages]
        return None, [state_key(keys[-1])] if keys else []

    def _give_up(self, wait: _Wait) -> None:
        """Others that wait for it may start one of their own."""
        if not wait.is_own:
            return
        self._traffic.end(wait.read, "late")
        wait.has_seen_end = True
        self._num_stalls = 0 if wait.read.num_read else self._num_stalls + 1
        if self._num_stalls == MAX_STALLS:
            logger.warning(
                "nothing is read from the prefix cache on disk any more: %d times in a row there "
                "was no page within %g s",
                MAX_STALLS,
                MAX_READ_WAIT_S,
            )

    def _take(self, sequence: Sequence, wait: _Wait) -> None:
        if sequence.status is not SequenceStatus.WAITING:
            if wait.is_own:
                self._traffic.end(wait.read)
            del self._waits[sequence]
            return
        contents = self._traffic.take(wait.read) if wait.is_own else []
        if not contents:
            return
        self._num_stalls = 0
        if wait.lacks_state:
            wait.state, *contents = contents
        if contents:
            self._install(sequence, wait, contents)
        num_pages = wait.num_state_pages
        if num_pages is not None and wait.num_before + wait.num_taken >= num_pages:
            self._install_state(sequence, wait, num_pages)

    def _install(self, sequence: Sequence, wait: _Wait, contents: list[bytes]) -> None:
        first = wait.num_before + wait.num_taken

        size = self._kv_cache.page_size

        def write(page_ids: list[int], start: int) -> bool:
            own = contents[start - first :]
            for index, content in enumerate(own, start):
                if not content.startswith(_tokens_of(sequence, index, size)):
                    return False
            try:
                self._runner.write_pages(page_ids, [each[4 * size :] for each in own])
            except Exception:
                logger.exception("the prefix cache on disk is off: pages could not be copied")
                self._is_off = True
            return not self._is_off

        num_added = self._kv_cache.install(sequence, first, len(contents), write)
        wait.num_taken += len(contents)
        self._num_read += num_added
        self._num_read_bytes += sum(map(len, contents[len(contents) - num_added :]))

    def _install_state(self, sequence: Sequence, wait: _Wait, num_pages: int) -> None:
        content, size = wait.state, self._kv_cache.page_size
        if not content or not content.startswith(_tokens_of(sequence, num_pages - 1, size)):
            return
        wait.state = b""

        def write(slot: int) -> bool:
            assert isinstance(self._runner, StateCopier), "a model with states has a StateCopier"
            try:
                self._runner.write_states([slot], [content[4 * size :]])
            except Exception:
                logger.exception("the prefix cache on disk is off: a state could not be copied")
                self._is_off = True
            return not self._is_off

        self._kv_cache.install_state(sequence, num_pages, write)

    def _copy_published(self) -> None:
        cache = self._kv_cache.prefix_cache
        assert cache is not None
        pages: dict[int, bytes] = {}
        while self._backlog and len(pages) < PAGES_PER_STEP:
            key, page_id = self._backlog.popitem(last=False)
            if key in self._folder:  # it was being written when it was used again
                self._traffic.touch(key)
            elif cache.page_of(key) == page_id:
                pages[page_id] = key
        if not pages:
            return
        contents = self._runner.read_pages(list(pages))
        for (page_id, key), content in zip(pages.items(), contents, strict=True):
            self._traffic.write(key, _bytes_of(cache.tokens_of(page_id)) + content)

    def _copy_state(self) -> None:
        cache, states = self._kv_cache.prefix_cache, self._kv_cache.states
        assert cache is not None
        assert states is not None
        assert isinstance(self._runner, StateCopier), "a model with states has a StateCopier"
        while self._state_backlog:
            key, slot = self._state_backlog.popitem(last=False)
            page_id = cache.page_of(key)
            if page_id is None or states.slot_of(page_id) != slot or state_key(key) in self._folder:
                continue
            (content,) = self._runner.read_states([slot])
            content = _bytes_of(cache.tokens_of(page_id)) + content
            if len(content) > self._folder.max_content_bytes:
                self._state_backlog.clear()
                self._note_large_state(len(content))
                return
            self._traffic.write(state_key(key), content)
            return

    def _note_large_state(self, num_bytes: int) -> None:
        if not self._has_noted_size:
            logger.warning(
                "snapshots of %d bytes are not stored: --prefix-cache-disk-bytes is too small for "
                "them, so that prompts are not found on the disk",
                num_bytes,
            )
        self._has_noted_size = True

    def _turn_off(self) -> None:
        self._is_off = True
        self._backlog.clear()
        self._state_backlog.clear()
        for wait in self._waits.values():
            self._traffic.end(wait.read)
        self._waits.clear()


def state_key(page_key: bytes) -> bytes:
    digest_size = len(page_key)
    return hashlib.blake2b(page_key, digest_size=digest_size, person=b"cadenza-state").digest()


def _tokens_of(sequence: Sequence, index: int, size: int) -> bytes:
    return _bytes_of(sequence.token_ids[index * size : (index + 1) * size])


def _bytes_of(token_ids: list[int] | tuple[int, ...]) -> bytes:
    return array("i", token_ids).tobytes()
