"""`enable_compilation_cache`: compiled programs are kept on disk, by JAX's persistent cache. A disk
that is full, or fails, ends no compilation, and is reported once in a process."""

import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

# JAX warns so of each program.
_FAILURE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '.*?': (.*)", re.DOTALL
)
_ERRNO = re.compile(r"^\w*Error: \[Errno \d+\] ")
_LINES = {
    "writing": "compiled programs cannot be kept in %s (%s): everything else goes on, and the next "
    "start compiles again; make room there, or set CADENZA_CACHE_DIR to another folder",
    "reading": "a compiled program in %s cannot be read (%s) and is compiled again; remove the "
    "folder, which is filled anew, to be rid of this line",
}

JUST_S = 5.0

logger = logging.getLogger(__name__)


def enable_compilation_cache(folder: Path) -> None:
    """Caches compiled programs on disk (JAX keys them by program, versions, flags and CPU), unless
    JAX_COMPILATION_CACHE_DIR is set. If the folder cannot be created, logs a warning."""
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not chosen:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("no compilation cache: the folder cannot be made (%s)", error.strerror)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _log_once(chosen or str(folder))


def _log_once(folder: str) -> None:
    warnings.filterwarnings("always", _FAILURE.pattern)
    shown = warnings.showwarning
    if not isinstance(shown, _Failures):
        warnings.showwarning = _Failures(others=shown, folder=folder)
    elif shown.folder != folder:
        shown.folder = folder
        shown.reported.clear()


@dataclass(slots=True, kw_only=True)
class _Failures:
    others: Callable[..., None]
    folder: str
    reported: set[str] = field(default_factory=set[str])

    def __call__(self, message: Warning | str, *where: Any, **more: Any) -> None:
        found = _FAILURE.match(str(message))
        if found is None:
            self.others(message, *where, **more)
            return
        kind, cause = found[1], _ERRNO.sub("", " ".join(found[2].split()))
        if kind == "writing":
            _remove_partial(Path(self.folder))
        if kind not in self.reported:
            self.reported.add(kind)
            logger.warning(_LINES[kind], self.folder, cause)


def _remove_partial(folder: Path) -> None:
    # JAX would read a partly written file, and never write it again.
    with suppress(OSError):
        age_s, path = min((time.time() - each.stat().st_mtime, each) for each in folder.iterdir())
        if age_s < JUST_S:
            path.unlink()
