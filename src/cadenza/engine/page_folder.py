"""`PageFolder`: pages of KV as files that engines share: `FOLDER/<fingerprint>/<2 digits>/<key>`
has a header, the content and a MAC keyed by `FOLDER/secret`; one thread writes below the locked
`FOLDER/writing-*` and renames. Invariants: `read` gives only what was stored under that key, secret
and fingerprint; engines together keep the bound on bytes."""

import errno
import fcntl
import hmac
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cadenza.errors import ConfigError

logger = logging.getLogger(__name__)

# Why a page was not read: it is not there; its file is not what was written; the disk was slow.
StoredMiss = Literal["absent", "damaged", "late"]

SECRET_BYTES = 32
MAGIC = b"cadenza page 1\0\0"
_HEADER = struct.Struct("<16s32sQ")
_MAC_BYTES = 32
OVERHEAD_BYTES = _HEADER.size + _MAC_BYTES

SCAN_SHARE = 32  # The folder is scanned again after writing one part in so many of its bound.
# The part of the bound that is made free at once, for what others write before their next scan.
ROOM_SHARE = 8

_LOCK_EVERY_S = 0.02

_LOCK, _SECRET, _WRITING = "lock", "secret", "writing-"
# Names of the folders of fingerprints, of those in them, and of pages. No other file is a page.
_LEVELS = tuple(map(re.compile, ("[0-9a-f]{32}", "[0-9a-f]{2}", "[0-9a-f]{64}")))


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as the scan found it."""

    path: Path
    used_ns: int
    num_bytes: int


WriteFile = Callable[[Path, bytes], object]
FindFiles = Callable[[Path], Iterable[StoredFile]]


def find_files(folder: Path) -> Iterator[StoredFile]:
    """Of any fingerprint. Follows no links; raises OSError."""
    for path in _find(folder, *_LEVELS):
        with suppress(FileNotFoundError):  # another engine has just removed it
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                yield StoredFile(path, found.st_mtime_ns, found.st_size)


def _find(folder: Path, name: re.Pattern[str], *deeper: re.Pattern[str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            matching = [each for each in entries if name.fullmatch(each.name)]
    except FileNotFoundError:  # another engine has just removed it
        return
    for entry in matching:
        if not deeper:
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            yield from _find(Path(entry.path), *deeper)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderAccess:
    """How files are written and found; `lock_within_s` for another process that opens the
    folder."""

    write_file: WriteFile = Path.write_bytes
    find_files: FindFiles = find_files
    lock_within_s: float = 10.0


class PageFolder:
    """Pages of one fingerprint; the folder has at most `max_bytes` of any. Raises ConfigError."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        max_bytes: int,
        access: FolderAccess | None = None,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._access = access or FolderAccess()
        self._known: set[bytes] = set()
        self._touched: set[bytes] = set()
        self._num_unscanned_bytes = 0
        self._listed_ns: dict[str, int] = {}
        self.error: str | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)
            with _locked(folder / _LOCK, self._access.lock_within_s):
                secret = _find_secret(folder / _SECRET)
                _remove_leftovers(folder)
                self._writing = folder / f"{_WRITING}{os.getpid()}-{secrets.token_hex(4)}"
                self._writing.mkdir(mode=0o700)
                hold = _lock(self._writing / _LOCK)
        except OSError as error:
            raise _unusable(folder, error) from error
        # Of a folder that is dropped, say because the weights cannot be loaded.
        self._release = weakref.finalize(self, _release, self._writing, hold, os.getpid())
        self._release.atexit = False
        # For the keys: no two fingerprints or secrets have a key in common
        self.key_secret = _derived(secret, b"keys", fingerprint)
        self._mac_secret = _derived(secret, b"contents", fingerprint)
        self._pages = folder / _derived(secret, b"folder", fingerprint).hex()[:32]
        try:
            self._pages.mkdir(mode=0o700, exist_ok=True)
            self._scan()
        except OSError as error:
            self.close()
            raise _unusable(folder, error) from error

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    @property
    def max_content_bytes(self) -> int:
        """Of the largest page that can be stored."""
        return self._max_bytes // SCAN_SHARE - OVERHEAD_BYTES

    def read(self, key: bytes) -> bytes | StoredMiss:
        """A file that is not what was written is removed."""
        path = self._path_of(key)
        try:
            data = _read_regular(path)
        except OSError:
            self._known.discard(key)
            return "absent"
        content = self._checked(key, data)
        if content is None:
            self._known.discard(key)
            _remove(path)
            return "damaged"
        self.touch(key)
        return content

    def touch(self, key: bytes) -> None:
        """Records a use; once between two scans."""
        if key in self._touched:
            return
        self._touched.add(key)
        with suppress(OSError):  # another engine may just have removed it
            os.utime(self._path_of(key))

    def write(self, key: bytes, content: bytes) -> bool:
        """False if it is there already, which counts as a use, or if writing fails, which ends all
        writing (`error` says why)."""
        size = len(content) + OVERHEAD_BYTES
        if self.error is not None:
            return False
        if key in self._known:
            self.touch(key)
            return False
        if len(content) > self.max_content_bytes:
            self._stop(f"a page has {size} bytes: --prefix-cache-disk-bytes is too small")
            return False
        path, partial = self._path_of(key), self._writing / key.hex()
        try:
            head = _HEADER.pack(MAGIC, key, len(content))
            data = b"".join((head, content, self._mac(head, content)))
            self._access.write_file(partial, data)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.replace(path)
        except OSError as error:
            _remove(partial)
            self._stop(error.strerror or type(error).__name__)
            return False
        self._known.add(key)
        self._num_unscanned_bytes += size
        if self._num_unscanned_bytes >= self._max_bytes // SCAN_SHARE:
            try:
                self._scan()
            except OSError as error:
                self._stop(error.strerror or type(error).__name__)
        return True

    def refresh(self) -> None:
        """Finds what other engines have stored, in folders changed since the last time; what it
        overlooks is a miss."""
        with suppress(OSError), os.scandir(self._pages) as entries:
            for entry in entries:
                if not (_LEVELS[1].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)):
                    continue
                changed_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                if self._listed_ns.get(entry.name) == changed_ns:
                    continue
                self._listed_ns[entry.name] = changed_ns
                names = filter(_LEVELS[2].fullmatch, os.listdir(entry.path))
                self._known.update(map(bytes.fromhex, names))

    def close(self) -> None:
        """Removes what belongs to this process only. Idempotent."""
        self._release()

    def _stop(self, reason: str) -> None:
        self.error = reason
        logger.warning("the prefix cache on disk is off: %s", reason)

    def _scan(self) -> None:
        files = sorted(self._access.find_files(self._folder), key=lambda each: each.used_ns)
        num_bytes = sum(each.num_bytes for each in files)
        most = self._max_bytes - self._max_bytes // ROOM_SHARE
        num_removed = 0
        if num_bytes > most:
            for each in files:
                if num_bytes <= most:
                    break
                _remove(each.path)
                num_bytes -= each.num_bytes
                num_removed += 1
        own = self._pages
        kept = (each.path for each in files[num_removed:] if each.path.parent.parent == own)
        self._known = {bytes.fromhex(path.name) for path in kept}
        self._num_unscanned_bytes = 0
        self._touched.clear()

    def _path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self._pages / name[:2] / name

    def _mac(self, *parts: bytes) -> bytes:
        state = hmac.new(self._mac_secret, digestmod="sha256")
        for part in parts:
            state.update(part)
        return state.digest()

    def _checked(self, key: bytes, data: bytes) -> bytes | None:
        if len(data) < OVERHEAD_BYTES:
            return None
        head, end = data[: _HEADER.size], len(data) - _MAC_BYTES
        content = data[_HEADER.size : end]
        is_own = head == _HEADER.pack(MAGIC, key, len(content))
        if not is_own or not hmac.compare_digest(self._mac(head, content), data[end:]):
            return None
        return content


def _unusable(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(f"--prefix-cache-disk {folder} cannot be used: {reason}")


def _check_private(folder: Path) -> None:
    found = folder.stat()
    _check_owner(folder, found)
    if found.st_mode & 0o022:
        raise ConfigError(
            f"--prefix-cache-disk {folder} can be written by others, who could then replace its "
            f"secret and its pages; take that from them (chmod go-w), or name another folder"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{path} belongs to another user (uid {found.st_uid}, not {os.getuid()}); give "
            f"--prefix-cache-disk a folder of this user's own"
        )


def _read_regular(path: Path) -> bytes:
    """Of a file that is neither a link nor a pipe. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


def _derived(secret: bytes, purpose: bytes, fingerprint: str) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + fingerprint.encode(), "sha256")


def _find_secret(path: Path) -> bytes:
    """Made if there is none. Only one process at a time is here."""
    if not path.exists():
        partial = path.with_name(f"{_SECRET}-{os.getpid()}")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    found = path.stat()
    _check_owner(path, found)
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read by others, who could then write pages that are taken for this "
            f"server's; remove it, or make it readable by its owner only (chmod 600)"
        )
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} has {len(secret)} bytes, not {SECRET_BYTES}; remove it")
    return secret


def _release(writing: Path, hold: int, process_id: int) -> None:
    if os.getpid() == process_id:  # not in a forked child
        shutil.rmtree(writing, ignore_errors=True)
    os.close(hold)


def _remove_leftovers(folder: Path) -> None:
    """Of processes that are gone: their locks can be taken."""
    for writing in folder.glob(f"{_WRITING}*"):
        try:
            descriptor = _lock(writing / _LOCK)
        except BlockingIOError:
            continue
        except OSError:
            descriptor = None
        shutil.rmtree(writing, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(path: Path, within_s: float) -> Generator[None]:
    end_s = time.monotonic() + within_s
    while True:
        try:
            descriptor = _lock(path)
            break
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise ConfigError(
                    f"{path} has been locked by another process for {within_s:g} seconds; end the "
                    f"one that hangs (fuser {path} names it), or name another folder"
                ) from None
            time.sleep(_LOCK_EVERY_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("a page cannot be removed: %s", error.strerror)
