"""The real engine process in a made-up system: a folder with the files of /proc and of the control
groups, given as the first argument; run as a script."""

import sys
from functools import partial
from pathlib import Path

from cadenza.engine.process.child import run_child
from cadenza.loading.engine_program import load_engine
from cadenza.loading.memory import HostMemory

if __name__ == "__main__":
    root, *arguments = sys.argv[1:]
    run_child(arguments, partial(load_engine, memory=HostMemory(Path(root))))
