"""`StoredPages`: `core.page_store.PageStore` over a folder: pages go to it, and come back.

Owns the thread that reads and writes files, and which waiting sequence waits for what. Pages are
copied from and to the device on the engine's thread, between two steps. Knows no file names.
Invariants: memory for pages on their way is bounded; a sequence waits at most `PATIENCE_S`; a page
enters the cache only if its tokens are those of the sequence.
"""

import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cadenza.backends.base import PageCopier
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.engine.page_folder import PageFolder, StoredMiss

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Longest wait of a sequence for pages."""

MAX_BACKLOG = 1 << 14
"""Published pages that may wait for being copied; the oldest of more are not stored."""

PAGES_PER_STEP = 16
"""Pages copied from the device between two steps."""

MAX_BYTES_ON_THE_WAY = 64 << 20
"""Of pages that were read and not taken yet, and of those that wait for being written, each."""

WAIT_S = 0.01
"""Longest wait of an engine that has nothing else to do."""

CLOSE_WITHIN_S = 5.0


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


@dataclass(slots=True, eq=False)
class _Read:
    """The pages of `keys` for a sequence, whose first `num_before` pages were in the cache.

    `contents` are those that have come and were not taken yet.
    """

    sequence: Sequence
    num_before: int
    keys: list[bytes]
    started_s: float
    contents: deque[bytes] = field(default_factory=deque[bytes])
    num_started: int = 0
    num_taken: int = 0
    is_ended: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_ended or bool(self.contents)

    def brings(self, key: bytes) -> bool:
        return self.is_open and key in self.keys


class StoredPages:
    """Between `runner`'s pages, of which `kv_cache` knows the keys, and `folder`."""

    def __init__(self, runner: PageCopier, kv_cache: KVCacheManager, folder: PageFolder) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._folder = folder
        self._reads: dict[Sequence, _Read] = {}
        self._backlog: OrderedDict[bytes, int] = OrderedDict()
        self._is_off = False
        self._misses: dict[StoredMiss, int] = {"absent": 0, "damaged": 0, "late": 0}
        self._num_read = self._num_read_bytes = 0
        self._num_written = self._num_written_bytes = 0
        # Of both threads, under the lock:
        self._change = threading.Condition()
        self._to_read: deque[_Read] = deque()
        self._to_write: deque[tuple[bytes, bytes]] = deque()
        self._to_touch: deque[bytes] = deque(maxlen=MAX_BACKLOG)
        self._num_bytes_to_write = 0
        self._num_bytes_read = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="stored-pages", daemon=True)
        self._thread.start()
        kv_cache.page_store = self

    @property
    def is_busy(self) -> bool:
        """Whether pages wait for being copied from or to the device."""
        return not self._is_off and bool(self._backlog or self._reads)

    @property
    def counts(self) -> StoredPageCounts:
        with self._change:
            return StoredPageCounts(
                num_read=self._num_read,
                num_read_bytes=self._num_read_bytes,
                num_written=self._num_written,
                num_written_bytes=self._num_written_bytes,
                misses=dict(self._misses),
            )

    def is_reading(
        self, sequence: Sequence, now_s: float, missing: Callable[[], tuple[int, list[bytes]]]
    ) -> bool:
        if self._is_off:
            return False
        read = self._reads.get(sequence)
        if read is None:
            num_before, keys = missing()
            if not keys:
                return False
            read = self._read_of(keys[0]) or self._start(sequence, num_before, keys, now_s)
        if read.is_open and now_s - read.started_s > PATIENCE_S:
            self._end(read, "late")
        return read.is_open

    def keep(self, key: bytes, page_id: int) -> None:
        if self._is_off:
            return
        if key in self._folder:
            self._to_touch.append(key)  # the thread need not be woken for it
            return
        self._backlog[key] = page_id
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.popitem(last=False)

    def advance(self) -> None:
        """Takes pages that were read, and copies published ones; between two steps."""
        if self._is_off:
            return
        try:
            for read in list(self._reads.values()):
                self._take(read)
            if self._backlog and self._has_room():
                self._copy_published()
        except Exception:
            logger.exception("the prefix cache on disk is off: pages could not be copied")
            self._turn_off()
        if self._is_off or self._folder.error is not None:
            self._turn_off()

    def wait(self) -> None:
        """Waits a moment for the thread, if there is anything that it must do first."""
        with self._change:
            has_come = any(read.contents or read.is_ended for read in self._reads.values())
            if has_come or (self._backlog and self._has_room()):
                return
            self._change.wait(WAIT_S)

    def close(self) -> None:
        """Writes what is left, within a bounded time, and ends the thread."""
        self._kv_cache.page_store = None
        end_s = time.monotonic() + CLOSE_WITHIN_S
        while self._backlog and not self._is_off and time.monotonic() < end_s:
            self.advance()
            self.wait()
        with self._change:
            self._is_closing = True
            self._to_read.clear()
            self._change.notify_all()
        self._thread.join(max(0.0, end_s - time.monotonic()))

    def _read_of(self, key: bytes) -> _Read | None:
        """The read that brings a page, if one does."""
        return next((each for each in self._reads.values() if each.brings(key)), None)

    def _start(self, sequence: Sequence, num_before: int, keys: list[bytes], now_s: float) -> _Read:
        """The read of what a sequence lacks; it has ended already if there is nothing of it."""
        read = _Read(sequence, num_before, keys, now_s)
        self._reads[sequence] = read
        with self._change:
            if keys[0] not in self._folder:
                read.is_ended = True
                self._misses["absent"] += 1
            else:
                self._to_read.append(read)
                self._change.notify_all()
        return read

    def _end(self, read: _Read, reason: StoredMiss | None = None) -> None:
        with self._change:
            read.is_ended = True
            self._num_bytes_read -= sum(map(len, read.contents))
            read.contents.clear()
            if reason is not None:
                self._misses[reason] += 1
            self._change.notify_all()

    def _take(self, read: _Read) -> None:
        """Puts the pages that have come into the cache."""
        if read.sequence.status is not SequenceStatus.WAITING:
            self._end(read)
            del self._reads[read.sequence]
            return
        with self._change:
            contents = list(read.contents)
            read.contents.clear()
            self._num_bytes_read -= sum(map(len, contents))
            self._change.notify_all()
        if not contents:
            return
        first = read.num_before + read.num_taken

        def write(page_ids: list[int], start: int) -> bool:
            own = contents[start - first :]
            size = self._kv_cache.page_size
            tokens = read.sequence.token_ids
            for index, content in enumerate(own, start):
                if not content.startswith(_bytes_of(tokens[index * size : (index + 1) * size])):
                    return False
            try:
                self._runner.write_pages(page_ids, [each[4 * size :] for each in own])
            except Exception:
                logger.exception("the prefix cache on disk is off: pages could not be copied")
                self._is_off = True
            return not self._is_off

        num_added = self._kv_cache.install(read.sequence, first, len(contents), write)
        read.num_taken += len(contents)
        self._num_read += num_added
        self._num_read_bytes += sum(map(len, contents[len(contents) - num_added :]))

    def _has_room(self) -> bool:
        return self._num_bytes_to_write < MAX_BYTES_ON_THE_WAY

    def _copy_published(self) -> None:
        """Copies pages from the device that are still in the cache."""
        cache = self._kv_cache.prefix_cache
        assert cache is not None
        pages: dict[int, bytes] = {}
        while self._backlog and len(pages) < PAGES_PER_STEP:
            key, page_id = self._backlog.popitem(last=False)
            if cache.page_of(key) == page_id and key not in self._folder:
                pages[page_id] = key
        if not pages:
            return
        contents = self._runner.read_pages(list(pages))
        for (page_id, key), content in zip(pages.items(), contents, strict=True):
            whole = _bytes_of(cache.tokens_of(page_id)) + content
            with self._change:
                self._to_write.append((key, whole))
                self._num_bytes_to_write += len(whole)
                self._change.notify_all()

    def _turn_off(self) -> None:
        self._is_off = True
        self._backlog.clear()
        for read in self._reads.values():
            self._end(read)
        self._reads.clear()

    def _serve(self) -> None:
        """The thread: reads come before writes; ends when all is written after `close`."""
        try:
            while True:
                with self._change:
                    while not (self._can_read() or self._to_write or self._is_closing):
                        self._change.wait()
                    read = self._to_read[0] if self._can_read() else None
                    if read is None and not self._to_write:
                        return
                    written = None if read is not None else self._to_write.popleft()
                if read is not None:
                    self._read_next(read)
                elif written is not None:
                    self._write(*written)
        finally:
            self._folder.close()

    def _can_read(self) -> bool:
        return bool(self._to_read) and self._num_bytes_read < MAX_BYTES_ON_THE_WAY

    def _read_next(self, read: _Read) -> None:
        at = read.num_started
        content = self._folder.read(read.keys[at])
        with self._change:
            read.num_started += 1
            is_page = isinstance(content, bytes)
            if not read.is_ended and is_page:
                read.contents.append(content)
                self._num_bytes_read += len(content)
            if not is_page:
                self._misses[content] += 1
            if read.is_ended or not is_page or read.num_started == len(read.keys):
                read.is_ended = True
                if read in self._to_read:  # `close` empties it
                    self._to_read.remove(read)
            self._change.notify_all()

    def _write(self, key: bytes, content: bytes) -> None:
        while self._to_touch:  # before a scan may remove what was not used for longest
            self._folder.touch(self._to_touch.popleft())
        is_written = self._folder.write(key, content)
        with self._change:
            self._num_bytes_to_write -= len(content)
            self._num_written += is_written
            self._num_written_bytes += len(content) * is_written
            self._change.notify_all()


def _bytes_of(token_ids: list[int] | tuple[int, ...]) -> bytes:
    return array("i", token_ids).tobytes()
