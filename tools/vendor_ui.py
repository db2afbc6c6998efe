"""Checks, and with --fetch makes, the libraries of the page at `/`, in `src/cadenza/ui/vendor`.

    python tools/vendor_ui.py            # offline: every file is the one of the table
    python tools/vendor_ui.py --fetch    # `npm pack` of each package, checked, then written

Owns the table of packages. Invariant: a file of `vendor` is a file of a package whose archive has
the table's SHA-512, changed only as `REWRITES` and `APPENDED` say; each package's licence is beside
it.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "src" / "cadenza" / "ui" / "vendor"
LICENSES = "LICENSES.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package of npm."""

    name: str
    version: str
    licence: str
    sha512: str  # of the archive, in hex
    files: Mapping[str, str]  # their names here, by their paths in the package


PACKAGES: tuple[Package, ...] = (
    Package(
        name="preact",
        version="11.2.0",
        licence="MIT",
        sha512="fc77c723fecdf387ba1ab581277276f34cf798b6912620dc4af8ff03ecbfe006"
        "cb9cd0ffd549461ded6c47aa18b931b021dd273fb76a0d4f4e9cbc4c3d9ef106",
        files={"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    ),
    Package(
        name="htm",
        version="3.1.1",
        licence="Apache-2.0",
        sha512="f7cdd5ca0f0dc1413b26467a3663aaa4267eb21d5b2afda2613954933956980e"
        "490f669c2a8c5de0a5716cc9b15fff399ad7dd9c399316834a720e43180bf135",
        files={"dist/htm.mjs": "htm.js"},
    ),
    Package(
        name="marked",
        version="18.2.1",
        licence="MIT",
        sha512="8a2e1bc424c2aaac294fce9765680936cf999c021992c98b19831589603b3c32"
        "1760878da35c7a703757dc93a2a7d34cfdc23aa7ccf9ec5c6588009ba13aee30",
        files={"lib/marked.esm.js": "marked.js"},
    ),
    Package(
        name="uplot",
        version="1.6.32",
        licence="MIT",
        sha512="2883159c6ebccefbb95d751b0b82d010f9e1c0ec41b8bc96d401eda66e882935"
        "c89a46cb824332fa369b8cb8122cc6ac36e186cd09bf7a9ded3a4c93c6989023",
        files={"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
    ),
)

# What is changed of a file, by its name here; each is there exactly once.
REWRITES: Mapping[str, tuple[tuple[bytes, bytes], ...]] = {
    # A browser resolves a bare name by an import map only, which would be an inline script.
    "hooks.js": ((b'from"preact"', b'from"./preact.js"'),),
}

APPENDED: Mapping[str, bytes] = {
    # It is a script that defines a global; so it is loaded as a module when it is needed.
    "uplot.js": b"\nexport default uPlot;\n",
}

# Of every file in `vendor`.
SHA256: Mapping[str, str] = {
    "LICENSES.txt": "4551d6b19bd07899e607c691055b8dd0450ccb92930ba6765358d2dbe36b81f3",
    "hooks.js": "5c65ab263688d0805862fd0807c779af02c2799c44fda0873dfcb870d0da70a0",
    "htm.js": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "marked.js": "c622dc6824a1c92c2d10ea9ede2fc872e46128afcc34b298e6ddee6f387ace8e",
    "preact.js": "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot.js": "8301d1a4fcc08355d4ff7e8c87cc4a4e13cc4da93ba50a20816005488c0c5f6e",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--fetch", action="store_true", help="fetch the packages by npm and write")
    if parser.parse_args(arguments).fetch:
        fetch(VENDOR)
    faults = find_faults(VENDOR)
    for fault in faults:
        print(f"vendor ui: {fault}", file=sys.stderr)
    print(f"vendor ui: {len(SHA256)} files of {len(PACKAGES)} packages, {len(faults)} at fault")
    return 1 if faults else 0


def find_faults(folder: Path) -> list[str]:
    """A line for each file that is missing, unknown, or another than the table's."""
    found = {path.name: _sha256(path.read_bytes()) for path in sorted(folder.iterdir())}
    faults = [f"{name} is missing" for name in SHA256 if name not in found]
    faults += [f"{name} is not in the table SHA256" for name in found if name not in SHA256]
    faults += [
        f"{name} has the SHA-256 {digest}, not the table's"
        for name, digest in found.items()
        if SHA256.get(name, digest) != digest
    ]
    licences = folder / LICENSES
    text = licences.read_text(encoding="utf-8") if licences.exists() else ""
    faults += [
        f"{LICENSES} lacks {heading_of(each)!r}"
        for each in PACKAGES
        if heading_of(each) not in text
    ]
    return faults


def heading_of(package: Package) -> str:
    """The line above the package's licence."""
    return f"{package.name} {package.version} ({package.licence})"


def fetch(folder: Path) -> None:
    """Writes all files. Raises ValueError where an archive is another than the table's."""
    licences: list[str] = []
    for package in PACKAGES:
        archive = _packed(package)
        digest = hashlib.sha512(archive).hexdigest()
        if digest != package.sha512:
            raise ValueError(f"{package.name}'s archive has the SHA-512 {digest}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            for path, name in package.files.items():
                (folder / name).write_bytes(_rewritten(name, _member(opened, path)))
            licence = _member(opened, "LICENSE").decode().strip()
        licences.append(f"{heading_of(package)}\n\n{licence}\n")
    text = ("\n" + "-" * 80 + "\n\n").join(licences)
    (folder / LICENSES).write_text(text, encoding="utf-8")


def _packed(package: Package) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


def _member(archive: tarfile.TarFile, path: str) -> bytes:
    member = archive.extractfile(f"package/{path}")
    assert member is not None, f"{path} is a file"
    return member.read()


def _rewritten(name: str, content: bytes) -> bytes:
    for old, new in REWRITES.get(name, ()):
        if content.count(old) != 1:
            raise ValueError(f"{name} has {old!r} {content.count(old)} times, not once")
        content = content.replace(old, new)
    # No maps are served, and a browser's tools would ask for them.
    lines = content.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not line.startswith(b"//# sourceMappingURL="))
    return kept + APPENDED.get(name, b"")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
