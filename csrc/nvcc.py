"""Whether a build has the kernels for NVIDIA GPUs, and the compiler that it needs for them.

Used by setup.py alone; `csrc/Makefile` has nvcc's flags.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

USUAL_TOOLKITS = ("/usr/local/cuda",)


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether CADENZA_CUDA asks for the kernels; ends the build if it is no answer."""
    asked = environment.get("CADENZA_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"CADENZA_CUDA={asked} is neither 0 nor 1")
    return asked == "1"


def find_nvcc(environment: Mapping[str, str], toolkits: Sequence[str] = USUAL_TOOLKITS) -> str:
    """NVCC, or the compiler on PATH, of CUDA_HOME, or of a toolkit in its usual place; ends the
    build if there is none."""
    homes = [each for each in (environment.get("CUDA_HOME"), *toolkits) if each]
    names = [
        environment.get("NVCC"),
        "nvcc",
        *(os.path.join(each, "bin", "nvcc") for each in homes),
    ]
    for name in names:
        found = shutil.which(name, path=environment.get("PATH", "")) if name else None
        if found is not None:
            return found
    raise SystemExit(
        "CADENZA_CUDA=1 asks for the kernels for NVIDIA GPUs, and there is no nvcc on PATH, in "
        f"CUDA_HOME/bin or in {', '.join(toolkits)}. Install the CUDA toolkit (13.0 is tested), or "
        "name its compiler in NVCC, or leave CADENZA_CUDA out: the package then computes with "
        "plain operations on GPUs"
    )
