"""The library of kernels for the card at hand, and the one with faults: those that are there, or
compiled for this card alone.

    python -m tests.gpu.kernels OUT LIMIT_S
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "src" / "cadenza"
FAULTY = CSRC / "build" / "native" / "faults" / "_cuda.so"
NAMED = "CADENZA_GPU_LIBRARY"
FAULTY_NAMED = "CADENZA_GPU_FAULTS_LIBRARY"
OLDEST = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """Args:
    name: the first one's, such as `NVIDIA H100 80GB HBM3`.
    targets: nvcc's names of all, such as `sm_90`.
    """

    name: str
    targets: tuple[str, ...]


def provide(out: Path, library: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Sees to it that `library` has code for each card of the machine; ends with what is lacking.

    A library that NAMED names is copied there. One that is there is taken if it is newer than its
    sources, as make would. Else make compiles for these cards; what it compiled before it was cut
    stays in `out`.
    """
    cards = find_cards()
    found = {"device": cards.name, "targets": cards.targets}
    if named := environment.get(NAMED):
        _take(NAMED, Path(named), library, cards.targets)
        return found | {"library": f"{NAMED}={named}"}
    if is_current(library) and not targets_without_code(library, cards.targets):
        return found | {"library": "was there"}
    _make(out, "cuda", cuda_words(out, library, cards.targets))
    return found | {"library": "compiled"}


def provide_faults(
    out: Path, library: Path, targets: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> str:
    """As `provide`, of the library with faults at `library`; says what became of it. Only the
    checks with faults need it, so nothing ends without one."""
    try:
        if named := environment.get(FAULTY_NAMED):
            _take(FAULTY_NAMED, Path(named), library, targets)
            return f"{FAULTY_NAMED}={named}"
        if is_current(library) and not targets_without_code(library, targets):
            return "was there"
        library.unlink(missing_ok=True)  # of other sources, or for other cards
        words = [*cuda_words(out, library, targets), f"FAULTY_CUDA_LIBRARY={library}"]
        _make(out, "cuda-faults", words, limit_s)
    except SystemExit as error:
        return f"not there: {error}"
    return "compiled"


def _take(name: str, named: Path, library: Path, targets: Sequence[str]) -> None:
    target = "cuda" if name == NAMED else "cuda-faults"
    if not named.is_file():
        raise SystemExit(
            f"{name}={named}: there is no such file; `make -C csrc {target}` makes one"
        )
    if lacking := targets_without_code(named, targets):
        raise SystemExit(
            f"{name}={named} has no code for {', '.join(lacking)}; make one by `make -C csrc "
            f"{target} CUDA_ARCHS={lacking[0][3:]}`, or leave {name} out"
        )
    if named.resolve() != library.resolve():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_name(library.name + ".new")
        shutil.copyfile(named, new)
        new.replace(library)


def find_cards() -> Cards:
    query = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"no GPU was found, as nvidia-smi cannot be run: {error}") from error
    found = [
        (name, (int(major), int(minor)))
        for name, major, minor in re.findall(r"^(.+), (\d+)\.(\d+)$", asked.stdout, re.MULTILINE)
    ]
    if asked.returncode != 0 or not found:
        said = (asked.stdout + asked.stderr).strip()
        raise SystemExit(f"nvidia-smi names no compute capability; it says: {said}")
    fit = [(name, capability) for name, capability in found if capability >= OLDEST]
    if not fit:
        name, (major, minor) = found[0]
        raise SystemExit(
            f"{name} has compute capability {major}.{minor}; the kernels need 8.0 or later"
        )
    targets = tuple(f"sm_{major}{minor}" for major, minor in sorted({each for _, each in fit}))
    return Cards(name=fit[0][0], targets=targets)


def is_current(library: Path) -> bool:
    """Whether it is newer than all its sources, which is make's rule."""
    sources = [*CSRC.glob("cuda/*.cu"), *CSRC.glob("*/*.h")]
    return library.exists() and library.stat().st_mtime >= max(
        each.stat().st_mtime for each in sources
    )


def targets_without_code(library: Path, targets: Sequence[str]) -> list[str]:
    from tools.cuda_library import architectures_of

    parts = architectures_of(library.read_bytes())
    return [each for each in targets if not (parts and all(_runs(part, each) for part in parts))]


def _runs(programs: frozenset[str], target: str) -> bool:
    """Machine code runs on later cards of its generation, which is the number without its end."""
    return any(
        each.startswith("sm_") and each[:-1] == target[:-1] and each[-1] <= target[-1]
        for each in programs
    )


def cuda_words(out: Path, library: Path, targets: Sequence[str]) -> list[str]:
    """For make: only these targets, without PTX. Each set of them has a folder of its own, so that
    objects for others are not taken."""
    archs = [each.removeprefix("sm_") for each in targets]
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [
        f"BUILD={out / 'kernels' / '-'.join(targets)}",
        f"CUDA_ARCHS={' '.join(archs)}",
        f"CUDA_CODE={' '.join(code)}",
        f"CUDA_LIBRARY={library}",
        f"NVCC={_nvcc()}",
    ]


def progress(out: Path) -> str:
    counts = [len([*each.glob("csrc/cuda/*.o")]) for each in (out / "kernels").glob("*")]
    return f"{max(counts, default=0)} of {len([*CSRC.glob('cuda/*.cu')])} files compiled"


def _nvcc() -> str:
    sys.path.append(str(CSRC))
    from nvcc import find_nvcc

    try:
        return find_nvcc(os.environ)
    except SystemExit:
        raise SystemExit(
            "there is no nvcc: put it on PATH, name it in NVCC, or let "
            f"{NAMED} name a library that `make cuda` made elsewhere"
        ) from None


def _make(out: Path, target: str, words: list[str], limit_s: float | None = None) -> None:
    import jaxlib

    log = out / "build.log"
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    include = Path(jaxlib.__file__).parent / "include"
    words = [*words, f"PYTHON={sys.executable}", f"FFI_INCLUDE={include}"]
    command = ("make", "-C", str(CSRC), jobs, target, *words)
    with log.open("a") as file, subprocess.Popen(command, stdout=file, stderr=file) as making:
        try:
            code = making.wait(limit_s)
        except subprocess.TimeoutExpired:
            making.terminate()  # its jobs end with it
            making.wait()
            raise SystemExit(f"not compiled within {limit_s:.0f} s; another run goes on") from None
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"the kernels were not built; {progress(out)}; {log} ends with:\n{last}")


def main(out: Path, limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    found = provide(out, PACKAGE / "_cuda.so", os.environ)
    if not [*PACKAGE.glob("_native.*")]:  # packs quantised weights, and computes in tests
        _make(out, "library", [])
    left_s = max(1.0, ends - time.monotonic())
    faults = provide_faults(out, FAULTY, found["targets"], os.environ, left_s)
    print(json.dumps(found | {"faults": faults}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
