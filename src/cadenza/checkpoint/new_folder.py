"""Writes a model's folder, which appears complete or not at all: `writing_folder`,
`copy_small_files`."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cadenza.errors import CheckpointError
from cadenza.models.config_json import CONFIG_FILE

_SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOTICES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


@contextmanager
def writing_folder(out: Path) -> Generator[Path]:
    """A folder to write, which becomes `out`, new or empty, at the end. Raises CheckpointError if
    `out` is not empty or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{str(out)!r} exists and is not an empty folder; name another one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
            folder = Path(name) / "folder"
            folder.mkdir()
            yield folder
            os.replace(folder, out)
    except OSError as error:
        raise CheckpointError(f"{str(out)!r} cannot be written: {error.strerror}") from error


def copy_small_files(source: Path, target: Path) -> None:
    """Copies tokenizer, template, generation settings and notices, not config.json."""
    for path in sorted(source.iterdir()):
        is_small = path.suffix in _SMALL_FILES or path.name.startswith(_NOTICES)
        is_replaced = path.name == CONFIG_FILE or path.name.endswith(".index.json")
        if path.is_file() and is_small and not is_replaced:
            shutil.copyfile(path, target / path.name)
