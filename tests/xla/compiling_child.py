"""Compiles some programs with a cache in a folder where no file can be written."""

import logging
import resource
import signal
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from cadenza.backends.xla.programs import enable_compilation_cache

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    enable_compilation_cache(Path(sys.argv[1]))
    enable_compilation_cache(Path(sys.argv[1]))  # as for a second model
    if sys.argv[2] == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    for size in range(3, 6):
        print(float(jax.jit(lambda x: x @ x)(jnp.ones(size))))
    warnings.warn("another warning", stacklevel=1)
