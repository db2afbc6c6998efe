"""Builds the native CPU kernels into one shared library beside the package.

Everything else about the project is in pyproject.toml. The library is optional: where it cannot be
built the package installs without it and says so once, unless CADENZA_REQUIRE_NATIVE=1.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")
OBJECTS = CSRC / "build" / "native"
"""Where `make -C csrc` looks for objects: it makes none again that an editable install made."""

LIBRARY_NAME = "_native.dylib" if sys.platform == "darwin" else "_native.so"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
]
SCALAR_FLAGS = ["-O2"]
"""As fast as with -O3, for which g++ 12 takes five times as long: the longest of all sources."""
AVX512_FLAGS = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISA_FLAGS = {
    "x86_64": {
        "avx512_bf16": [*AVX512_FLAGS, "-mavx512bf16"],
        "avx512": AVX512_FLAGS,
        "avx2": ["-mavx2", "-mfma"],
        "scalar": [],
        "int8_avx512_vnni": [*AVX512_FLAGS, "-mavx512vnni"],
        "int8_avx_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
        "int8_avx2": ["-mavx2", "-mfma", "-mf16c"],
        "int8_scalar": SCALAR_FLAGS,
    },
    "aarch64": {
        "neon_bf16": ["-march=armv8.2-a+bf16"],
        "neon": [],
        "scalar": [],
        "int8_neon_dotprod": ["-march=armv8.2-a+dotprod"],
        "int8_neon": [],
        "int8_scalar": SCALAR_FLAGS,
    },
}
OPTIONAL_ISAS = ("int8_avx_vnni",)
"""Left out if the compiler does not know their flags: g++ knows this one's from version 11 on."""

MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


def isa_flags() -> dict[str, list[str]]:
    """Flags of each kernel source that this machine's architecture can have."""
    machine = platform.machine().lower()
    plain = {"scalar": [], "int8_scalar": SCALAR_FLAGS}
    return ISA_FLAGS.get(MACHINE_ALIASES.get(machine, machine), plain)


def ffi_include_dir() -> str:
    """The directory of the XLA FFI headers that jaxlib carries, without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise RuntimeError("jaxlib, which carries the XLA FFI headers, is not installed")
    return str(Path(spec.origin).parent / "include")


def native_sources() -> list[str]:
    portable = [
        str(path) for part in ("core", "ffi") for path in (ROOT / CSRC / part).glob("*.cpp")
    ]
    kernels = [str(ROOT / CSRC / "isa" / f"{isa}.cpp") for isa in isa_flags()]
    return sorted(os.path.relpath(path, ROOT) for path in [*portable, *kernels])


def native_headers() -> list[str]:
    return sorted(os.path.relpath(path, ROOT) for path in (ROOT / CSRC).rglob("*.h"))


class BuildNative(build_ext):
    """Compiles each source with its own ISA's flags; no Python module, a plain shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY_NAME)

    def build_extension(self, ext: Extension) -> None:
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

    def _accepts(self, flags: list[str]) -> bool:
        """Whether the compiler knows the flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "empty.cpp"
            source.write_text("")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except CompileError:
                return False
        return True

    def _build(self, ext: Extension) -> None:
        isas = {
            isa: flags
            for isa, flags in isa_flags().items()
            if isa not in OPTIONAL_ISAS or self._accepts(flags)
        }
        left_out = sorted(isa_flags().keys() - isas.keys())
        kernels = {source for source in ext.sources if "isa" in Path(source).parts}

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=str(OBJECTS) if self.editable_mode else self.build_temp,
                macros=[(f"CADENZA_WITHOUT_{isa.upper()}", None) for isa in left_out],
                include_dirs=[str(CSRC), ffi_include_dir()],
                extra_postargs=[
                    *COMMON_FLAGS,
                    *(isas[Path(source).stem] if source in kernels else []),
                ],
                depends=ext.depends,
            )

        used = [each for each in ext.sources if Path(each).stem not in left_out]
        used.sort(key=lambda source: source not in kernels)  # the longest first
        with ThreadPoolExecutor(os.cpu_count()) as compiling:
            compiled = list(compiling.map(compile_one, used))
        objects = sorted(path for paths in compiled for path in paths)
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath_built(ext) if self.inplace else self.get_ext_fullpath(ext.name),
            extra_postargs=["-lpthread"] if sys.platform != "darwin" else [],
            target_lang="c++",
        )


setup(
    ext_modules=[Extension("cadenza._native", native_sources(), depends=native_headers())],
    cmdclass={"build_ext": BuildNative},
)
