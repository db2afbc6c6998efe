"""Builds the native CPU kernels into one shared library beside the package, and those for NVIDIA
GPUs into another if CADENZA_CUDA=1.

Everything else about the project is in pyproject.toml. The CPU's library is optional: where it
cannot be built the package installs without it and says so once, unless CADENZA_REQUIRE_NATIVE=1.
The GPU's is built because somebody asked for it, so that a failure ends the build.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")
sys.path.insert(0, str(ROOT / CSRC))
import isas  # noqa: E402  the build's own, beside the kernels
import nvcc  # noqa: E402

OBJECTS = CSRC / "build" / "native"
"""Where `make -C csrc` looks for objects: it makes none again that an editable install made."""

ISA_TABLES = OBJECTS / CSRC / "core" / "isa.o"

IS_MACOS = sysconfig.get_platform().startswith("macosx")
"""What is built for, which need not be the system that builds."""

SUFFIX = ".dylib" if IS_MACOS else ".so"
CUDA = "cadenza._cuda"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
]


def ffi_include_dir() -> str:
    """The directory of the XLA FFI headers that jaxlib carries, without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise RuntimeError("jaxlib, which carries the XLA FFI headers, is not installed")
    return str(Path(spec.origin).parent / "include")


def native_sources() -> list[str]:
    """Those of every build; the build adds the kernels of its instruction sets."""
    found = [path for part in ("core", "ffi") for path in (ROOT / CSRC / part).glob("*.cpp")]
    return sorted(os.path.relpath(path, ROOT) for path in found)


def native_headers() -> list[str]:
    return sorted(os.path.relpath(path, ROOT) for path in (ROOT / CSRC).rglob("*.h"))


class BuildNative(build_ext):
    """Compiles each source with its own ISA's flags; no Python module, a plain shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + SUFFIX

    def build_extension(self, ext: Extension) -> None:
        if ext.name == CUDA:
            self._build_cuda(ext)
            return
        try:
            self._build(ext)
        except Exception as error:  # any failure means the same: no native kernels
            if os.environ.get("CADENZA_REQUIRE_NATIVE") == "1":
                raise
            print(
                f"cadenza: the native CPU kernels were not built ({error}); "
                "the package works without them, more slowly",
                file=sys.stderr,
            )

    def copy_extensions_to_source(self) -> None:
        built = [ext for ext in self.extensions if os.path.exists(self.get_ext_fullpath_built(ext))]
        self.extensions, everything = built, self.extensions
        super().copy_extensions_to_source()
        self.extensions = everything

    def get_ext_fullpath_built(self, ext: Extension) -> str:
        return os.path.join(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))

    def _build(self, ext: Extension) -> None:
        if self.editable_mode and ISA_TABLES.exists():
            ISA_TABLES.unlink()  # its content follows from the sets, which may be others today
        chosen = isas.isas_to_build(self.compiler.compiler_cxx)
        self._use_ccache()
        macros = list(isas.table_macros(chosen).items())
        kernels = {str(CSRC / "isa" / f"{isa}.cpp"): flags for isa, flags in chosen.items()}

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=str(OBJECTS) if self.editable_mode else self.build_temp,
                macros=macros,
                include_dirs=[str(CSRC), ffi_include_dir()],
                extra_postargs=[*COMMON_FLAGS, *kernels.get(source, [])],
                depends=ext.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as compiling:  # the longest first
            compiled = list(compiling.map(compile_one, [*kernels, *ext.sources]))
        objects = sorted(path for paths in compiled for path in paths)
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath_built(ext) if self.inplace else self.get_ext_fullpath(ext.name),
            extra_postargs=[] if IS_MACOS else ["-lpthread"],
            target_lang="c++",
        )

    def _build_cuda(self, ext: Extension) -> None:
        """By csrc/Makefile, which has nvcc's flags."""
        target = self.get_ext_fullpath_built(ext) if self.inplace else self.get_ext_fullpath(CUDA)
        objects = OBJECTS if self.editable_mode else Path(self.build_temp) / "cuda"
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        arguments = {
            "BUILD": os.path.abspath(objects),
            "CUDA_LIBRARY": os.path.abspath(target),
            "FFI_INCLUDE": ffi_include_dir(),
            "NVCC": nvcc.find_nvcc(os.environ),
            "PYTHON": sys.executable,
        }
        words = [f"{name}={value}" for name, value in arguments.items()]
        jobs = f"-j{os.cpu_count() or 1}"
        try:
            subprocess.run(
                [shutil.which("make") or "make", "-C", str(CSRC), jobs, "cuda", *words], check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"the kernels for NVIDIA GPUs were not built: {error}") from error

    def _use_ccache(self) -> None:
        ccache = shutil.which("ccache")
        for name in ("compiler_so", "compiler_so_cxx"):
            command = getattr(self.compiler, name, None)
            if ccache is not None and command and Path(command[0]).name != "ccache":
                setattr(self.compiler, name, [ccache, *command])


class RecordedBuild(build_py):
    """Writes `cadenza/build.json` into a wheel, which `--version` and `doctor` show. The commit is
    CADENZA_BUILD_COMMIT, or that of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        record = {
            "commit": os.environ.get("CADENZA_BUILD_COMMIT")
            or first_line("git", "rev-parse", "HEAD"),
            "platform": sysconfig.get_platform(),
            "compiler": first_line(*shlex.split(os.environ.get("CXX", "c++")), "--version"),
        }
        known = {key: value for key, value in record.items() if value}
        path = Path(self.build_lib, "cadenza", "build.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known) + "\n", encoding="utf-8")


def first_line(*command: str) -> str:
    """Of what the command prints; empty if it cannot be run."""
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ran.stdout.partition("\n")[0].strip()


class PlatformWheel(bdist_wheel):
    """Tags a wheel for its platform alone: the library is no Python module."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if sys.platform == "win32":
    raise SystemExit(
        "Cadenza runs on Linux and macOS. On Windows install it in WSL: wsl --install, then there "
        "as on Linux."
    )
EXTENSIONS = [Extension("cadenza._native", native_sources(), depends=native_headers())]
if nvcc.is_asked_for(os.environ):
    nvcc.find_nvcc(os.environ)  # before anything is compiled
    EXTENSIONS.append(Extension(CUDA, []))

setup(
    ext_modules=EXTENSIONS,
    cmdclass={
        "bdist_wheel": PlatformWheel,
        "build_ext": BuildNative,
        "build_py": RecordedBuild,
    },
)
