"""`python -m cadenza.engine.process`: the program that a front end executes; of no use by hand."""

import sys

from cadenza.engine.process.child import OnPhase, Serving, run_child
from cadenza.engine.process.messages import Start


def load(start: Start, on_phase: OnPhase) -> Serving:
    """Loads a model. Raises what `load_model` raises."""
    on_phase("imports")
    from cadenza.engine.build import (
        describe_backend,
        find_checkpoint,
        load_model,
        watch_compiles,
    )

    checkpoint = find_checkpoint(start.model, revision=start.config.revision)
    describe_backend(start.config, checkpoint.config)
    on_phase("load")
    loaded = load_model(start.model, start.config, lambda done: _after(done, on_phase))
    return Serving(core=loaded.core, count_compiles=watch_compiles())


def _after(done: str, on_phase: OnPhase) -> None:
    if done == "load":
        on_phase("compile")


if __name__ == "__main__":
    run_child(sys.argv[1:], load)
