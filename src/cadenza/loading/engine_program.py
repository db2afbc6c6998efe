"""`python -m cadenza.loading.engine_program`: the program of the engine process.

Started by `EngineProcess`; loads an engine and serves it over an inherited pipe.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.engine.process.child import OnPhase, Serving, run_child
from cadenza.engine.process.messages import Start
from cadenza.loading.memory import HOST_MEMORY, HostMemory


def load_engine(
    start: Start,
    on_phase: OnPhase,
    backends: Backends = BACKENDS,
    memory: HostMemory = HOST_MEMORY,
) -> Serving:
    """Loads the model of `start`. Raises the errors of `open_planned` and `build_serving_core`."""
    on_phase("imports")
    from cadenza.loading.build import build_serving_core, open_planned
    from cadenza.loading.fingerprint import make_fingerprint
    from cadenza.loading.identity import identify

    config = start.config
    checkpoint, plan = open_planned(
        start.model, config, backends, memory
    )  # imports the array library
    on_phase("load")

    def after(done: str) -> None:
        if done == "load":
            on_phase("compile")

    with ThreadPoolExecutor(1) as thread:  # reads the weights, while they are loaded
        fingerprint = thread.submit(make_fingerprint, checkpoint, plan, config, backends)
        core = build_serving_core(checkpoint, plan, config, after, backends=backends)
    backend = find_backend(config.backend, backends)
    return Serving(
        core=core,
        fingerprint=fingerprint.result(),
        identity=identify(checkpoint, plan, config, backend),
        count_compiles=backend.watch_compiles(),
    )


if __name__ == "__main__":
    run_child(sys.argv[1:], load_engine)
