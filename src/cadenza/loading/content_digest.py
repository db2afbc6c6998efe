"""`content_digest`: a digest of a checkpoint's settings and of every byte of its weights. Files are
read once, on several threads; the digest is cached under the file's identity and times, so that the
next start reads nothing. Equal digests mean equal settings and tensors."""

import hashlib
import logging
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cadenza.checkpoint.folder import Checkpoint

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
MAX_THREADS = 4
MIN_CACHED_BYTES = 64 << 20  # smaller files take less than a tenth of a second

_DIGEST_CHARS = 64


def digest_of(parts: Iterable[str]) -> str:
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(framed.encode(errors="surrogatepass")).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file of the cache folder atomically. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def content_digest(checkpoint: Checkpoint, cache_folder: Path) -> str:
    state = hashlib.sha256(checkpoint.digest.encode())
    for path in _weight_files(checkpoint):
        state.update(_file_digest(path, cache_folder / "digests").encode())
    return state.hexdigest()


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    if checkpoint.is_known:
        return [file.path for file in checkpoint.weights.files]
    return sorted(checkpoint.folder.glob("*.safetensors"))


def _file_digest(path: Path, folder: Path) -> str:
    """Of one file, from the cache if neither its content nor its inode has changed."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        name = hashlib.sha256(repr((str(path.resolve()), identity)).encode()).hexdigest()
        kept = None if found.st_size < MIN_CACHED_BYTES else folder / name
        digest = None if kept is None else _read_kept(kept)
        if digest is None:
            digest = _digest_of(file.fileno(), found.st_size)
            if kept is not None:
                _keep(kept, digest)
        return digest


def _digest_of(descriptor: int, num_bytes: int) -> str:
    """A SHA-256 of the SHA-256 of each chunk, so that several threads can work on one file."""
    state = hashlib.sha256(str(num_bytes).encode())
    if num_bytes:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:

            def chunk_digest(start: int) -> bytes:
                return hashlib.sha256(view[start : start + CHUNK_BYTES]).digest()

            with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
                for each in threads.map(chunk_digest, range(0, num_bytes, CHUNK_BYTES)):
                    state.update(each)
    return state.hexdigest()


def _read_kept(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == _DIGEST_CHARS else None


def _keep(path: Path, digest: str) -> None:
    """Best effort: without a cache the digest is computed again."""
    try:
        replace_file(path, digest.encode("ascii"))
    except OSError as error:
        logger.warning("the digest of the weights cannot be kept: %s", error.strerror)
