"""`PageTraffic`: the thread that reads and writes the files of a `PageFolder`, and the queues to
it. Knows no sequences, so that an engine is freed while the thread lives. Invariants: memory for
pages on their way is bounded; reads come before writes; after any error nothing is read or written,
and `is_broken` says so."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from cadenza.engine.page_folder import PageFolder, StoredMiss

logger = logging.getLogger(__name__)

# Of pages that were read and not taken yet, and of those that wait for being written, each.
MAX_BYTES_ON_THE_WAY = 64 << 20

# How often it is looked for what other engines have stored in the same folder.
REFRESH_EVERY_S = 1.0

MAX_TOUCHES = 1 << 14  # Pages that may wait for being marked as used


@dataclass(slots=True, eq=False)
class PageRead:
    """`contents` of `keys`, in order, that came and were not taken yet."""

    keys: list[bytes]
    contents: deque[bytes] = field(default_factory=deque[bytes])
    num_started: int = 0
    num_read: int = 0
    is_ended: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_ended or bool(self.contents)

    def brings(self, key: bytes) -> bool:
        return self.is_open and key in self.keys


class PageTraffic:
    """Until `stop`; the thread then closes the folder."""

    def __init__(self, folder: PageFolder) -> None:
        self._folder = folder
        self._change = threading.Condition()
        # All under its lock:
        self._to_read: deque[PageRead] = deque()
        self._to_write: deque[tuple[bytes, bytes]] = deque()
        self._to_touch: deque[bytes] = deque(maxlen=MAX_TOUCHES)
        self._num_bytes_to_write = 0
        self._num_bytes_read = 0
        self._is_stopping = False
        self._refresh_at_s = time.monotonic() + REFRESH_EVERY_S
        self.is_broken = False
        self.num_written = self.num_written_bytes = 0
        self.misses: dict[StoredMiss, int] = {"absent": 0, "damaged": 0, "late": 0}
        self._thread = threading.Thread(target=self._serve, name="stored-pages", daemon=True)
        self._thread.start()

    @property
    def is_off(self) -> bool:
        return self.is_broken or self._folder.error is not None

    @property
    def has_room(self) -> bool:
        return self._num_bytes_to_write < MAX_BYTES_ON_THE_WAY

    def read(self, keys: list[bytes]) -> PageRead:
        read = PageRead(keys)
        with self._change:
            if keys[0] not in self._folder:
                read.is_ended = True
                self.misses["absent"] += 1
            else:
                self._to_read.append(read)
                self._change.notify_all()
        return read

    def take(self, read: PageRead) -> list[bytes]:
        with self._change:
            contents = list(read.contents)
            read.contents.clear()
            self._num_bytes_read -= sum(map(len, contents))
            self._change.notify_all()
        return contents

    def end(self, read: PageRead, reason: StoredMiss | None = None) -> None:
        """Drops what has not come or was not taken."""
        with self._change:
            read.is_ended = True
            self._num_bytes_read -= sum(map(len, read.contents))
            read.contents.clear()
            if reason is not None:
                self.misses[reason] += 1
            self._change.notify_all()

    def write(self, key: bytes, content: bytes) -> None:
        with self._change:
            self._to_write.append((key, content))
            self._num_bytes_to_write += len(content)
            self._change.notify_all()

    def touch(self, key: bytes) -> None:
        with self._change:
            self._to_touch.append(key)
            if len(self._to_touch) == 1:
                self._change.notify_all()

    def wait(self, seconds: float, *reads: PageRead) -> bool:
        """False at once if anything of `reads` has come or one has ended."""
        with self._change:
            if any(read.contents or read.is_ended for read in reads):
                return False
            self._change.wait(seconds)
            return True

    def stop(self) -> None:
        """The thread writes what is left and ends. Idempotent."""
        with self._change:
            self._is_stopping = True
            self._to_read.clear()
            self._change.notify_all()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _serve(self) -> None:
        try:
            while self._serve_next():
                pass
        except Exception:
            logger.exception("the prefix cache on disk is off")
            with self._change:
                self.is_broken = True
                for read in self._to_read:
                    read.is_ended = True
                self._change.notify_all()
        finally:
            self._folder.close()

    def _serve_next(self) -> bool:
        now_s = time.monotonic()
        if now_s >= self._refresh_at_s and not self._is_stopping:
            self._folder.refresh()
            self._refresh_at_s = now_s + REFRESH_EVERY_S
        with self._change:
            while not (self._can_read() or self._to_write or self._to_touch or self._is_stopping):
                if not self._change.wait(REFRESH_EVERY_S):
                    return True
            read = self._to_read[0] if self._can_read() else None
            touched = [] if read is not None else list(self._to_touch)
            written = None
            if read is None:
                self._to_touch.clear()
                if self._to_write:
                    written = self._to_write.popleft()
        if read is not None:
            self._read_next(read)
            return True
        for key in touched:  # before a scan may remove what was not used for longest
            self._folder.touch(key)
        if written is not None:
            self._write(*written)
        return bool(touched or written)

    def _can_read(self) -> bool:
        return bool(self._to_read) and self._num_bytes_read < MAX_BYTES_ON_THE_WAY

    def _read_next(self, read: PageRead) -> None:
        content = self._folder.read(read.keys[read.num_started])
        with self._change:
            read.num_started += 1
            is_page = isinstance(content, bytes)
            if is_page:
                read.num_read += 1
                if not read.is_ended:
                    read.contents.append(content)
                    self._num_bytes_read += len(content)
            else:
                self.misses[content] += 1
            if read.is_ended or not is_page or read.num_started == len(read.keys):
                read.is_ended = True
                if read in self._to_read:  # `stop` empties it
                    self._to_read.remove(read)
            self._change.notify_all()

    def _write(self, key: bytes, content: bytes) -> None:
        is_written = self._folder.write(key, content)
        with self._change:
            self._num_bytes_to_write -= len(content)
            self.num_written += is_written
            self.num_written_bytes += len(content) * is_written
            self._change.notify_all()
