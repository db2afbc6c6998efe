"""The real engine process, but it chooses among other backends; run as a script.

Python looks for modules beside a script first, so the stub is found without the name of its folder.
"""

import sys
from functools import partial

from cadenza.engine.process.worker import run_child
from cadenza.loading.engine_program import load_engine

STUBS = {"stub": "stub_backend:StubBackend"}

if __name__ == "__main__":
    run_child(sys.argv[1:], partial(load_engine, backends=STUBS))
