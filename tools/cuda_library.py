"""Checks a library of the kernels for NVIDIA GPUs, on a machine without one.

    python tools/cuda_library.py [LIBRARY]

It must load and have what the package calls, the operations of the CPU's program in the same order,
and code for the architectures `ARCHITECTURES` and PTX for later ones. Without an argument it is the
installed package's.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from cadenza.backends.xla.ops.cuda_library import cuda_library_path, open_cuda_library
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.errors import ConfigError

ARCHITECTURES = ("sm_80", "sm_90")
PTX = "ptx_90"

# The begin of a group of programs that nvcc puts into a library: one for each architecture.
_FATBIN = b"\x50\xed\x55\xba"

_HEADER = struct.Struct("<4sHHQ")  # magic, version, bytes of the header, bytes behind it
_PROGRAM = struct.Struct("<HHIQIIHHI")  # kind, …, bytes of the header, bytes behind it, …, number
_KINDS = {1: "ptx", 2: "sm"}


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else cuda_library_path()
    faults = [*find_faults(path)]
    for fault in faults:
        print(f"cuda library: {fault}", file=sys.stderr)
    print(f"cuda library: {path.name}, {len(faults)} at fault")
    return 1 if faults else 0


def find_faults(path: Path) -> Iterator[str]:
    """What is wrong with the library at `path`."""
    try:
        library = open_cuda_library(path.resolve(), platform="CUDA", prefix="checked_")
    except (ConfigError, AttributeError) as error:
        yield str(error)
        return
    if library.operations != load_native_library().operations:
        yield "its operations are not those of the CPU's program"
    found = architectures_of(path.read_bytes())
    if not found:
        yield "it has no code for a GPU"
    for programs in found:
        yield from (f"code for {each} is missing" for each in ARCHITECTURES if each not in programs)
    if found and not any(PTX in programs for programs in found):  # the linker's own group has none
        yield f"{PTX} is missing"


def architectures_of(content: bytes) -> set[frozenset[str]]:
    """Of each group of programs in a library, for what they are: `sm_90`, `ptx_90`."""
    found: set[frozenset[str]] = set()
    start = content.find(_FATBIN)
    while start >= 0:
        _, _, header_bytes, num_bytes = _HEADER.unpack_from(content, start)
        at, programs = start + header_bytes, list[str]()
        while at < start + header_bytes + num_bytes:
            kind, _, own_header, own_bytes, *_, number = _PROGRAM.unpack_from(content, at)
            programs.append(f"{_KINDS.get(kind, kind)}_{number}")
            at += own_header + own_bytes
        found.add(frozenset(programs))
        start = content.find(_FATBIN, at)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
