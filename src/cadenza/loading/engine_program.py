"""`python -m cadenza.loading.engine_program`: the program that a front end executes.

It loads an engine and serves it over an inherited pipe; of no use by hand.
"""

import sys

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.engine.process.child import OnPhase, Serving, run_child
from cadenza.engine.process.messages import Start


def load(start: Start, on_phase: OnPhase, backends: Backends = BACKENDS) -> Serving:
    """Loads a model. Raises what `load_engine` raises."""
    on_phase("imports")
    from cadenza.loading.build import find_checkpoint, load_engine

    config = start.config
    checkpoint = find_checkpoint(start.model, revision=config.revision)
    backend = find_backend(config.backend, backends)
    backend.describe(config.device, config.ops, checkpoint.config)
    on_phase("load")

    def after(done: str) -> None:
        if done == "load":
            on_phase("compile")

    loaded = load_engine(start.model, config, after, backends=backends)
    return Serving(core=loaded.core, count_compiles=backend.watch_compiles())


if __name__ == "__main__":
    run_child(sys.argv[1:], load)
