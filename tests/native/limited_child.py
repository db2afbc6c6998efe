"""The real engine process in a made-up system: a folder with the files of /proc and of the control
groups, given as the first argument; run as a script.

Its KV pool is resident from the start, as one is that requests have filled."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from cadenza.backends.base import Runner, RunnerSetup
from cadenza.backends.xla.backend import XlaBackend
from cadenza.checkpoint.folder import Checkpoint
from cadenza.engine.process.worker import run_child
from cadenza.loading.engine_program import load_engine
from cadenza.loading.memory import HostMemory


class FilledBackend(XlaBackend):
    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        return XlaBackend.load_runner(self, checkpoint, replace(setup, fill=0.0))


if __name__ == "__main__":
    root, *arguments = sys.argv[1:]
    backends = {"xla": f"{Path(__file__).stem}:{FilledBackend.__name__}"}
    memory = HostMemory(Path(root))
    run_child(arguments, partial(load_engine, backends=backends, memory=memory))
