"""`python -m cadenza.loading.engine_program`: the program of the engine process. Started by
`ProcessLink`; loads an engine and serves it over an inherited pipe."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.config import EngineConfig
from cadenza.engine.process.messages import Start
from cadenza.engine.process.worker import OnPhase, Serving, run_child
from cadenza.errors import ConfigError
from cadenza.loading.memory import HOST_MEMORY, HostMemory

if TYPE_CHECKING:
    from cadenza.loading.planned_engine import PlannedEngine

logger = logging.getLogger(__name__)

_ENOUGH_BYTES = 1 << 60
# of a GPU's memory, for all engines together, unless --gpu-memory-utilization is set
GPU_SHARE = 0.75


def load_engine(
    start: Start,
    on_phase: OnPhase,
    backends: Backends = BACKENDS,
    memory: HostMemory = HOST_MEMORY,
) -> Serving:
    """Raises the errors of `open_planned` and `build_serving_core`."""
    on_phase("imports")
    from cadenza.loading.build import build_serving_core, release_tokenizer, reserve_planned

    engine = replace(open_start(start, backends, memory), config=start.config)
    reservation = reserve_planned(engine.plan)
    on_phase("load")

    def after(done: str) -> None:
        if done == "load":
            on_phase("compile")

    with ThreadPoolExecutor(1) as thread:  # reads the weights, while they are loaded
        identity = thread.submit(engine.identity)
        core = build_serving_core(engine, after, start.prefix_secret)
        found = identity.result()
    release_tokenizer(engine.checkpoint)
    return Serving(
        core=core,
        fingerprint=found.fingerprint,
        identity=found.digest("streams"),
        count_compiles=engine.backend.watch_compiles(),
        held=reservation,
    )


def open_start(
    start: Start, backends: Backends = BACKENDS, memory: HostMemory = HOST_MEMORY
) -> "PlannedEngine":
    """As `open_planned`. A restart keeps the sizes of the first start, which open requests depend
    on, also where a little less memory is free now; it logs a warning then."""
    from cadenza.loading.build import open_planned

    asked = start.model, _with_share_of_gpu(start, backends), backends
    memory = replace(memory, front_end_bytes=start.front_end_bytes, most_bytes=start.share_bytes)
    try:
        return open_planned(*asked, memory, start.bodies_bytes)
    except ConfigError as error:
        if not start.is_restart:
            raise _told_of_share(error, start) from None
        enough = replace(memory, least_bytes=_ENOUGH_BYTES, most_bytes=None)
        opened = open_planned(*asked, enough, start.bodies_bytes)
        logger.warning("less memory is free than at the first start, whose plan is kept: %s", error)
        return opened


def _with_share_of_gpu(start: Start, backends: Backends) -> EngineConfig:
    config, num_engines = start.config, start.num_engines
    if num_engines == 1:
        return config
    if config.gpu_memory_utilization is not None:
        return replace(config, gpu_memory_utilization=config.gpu_memory_utilization / num_engines)
    find_backend(config.backend, backends).reserve_memory(GPU_SHARE / num_engines)
    return config


def _told_of_share(error: ConfigError, start: Start) -> ConfigError:
    if start.share_bytes is None:
        return ConfigError(str(error))
    return ConfigError(
        f"{error} (this model's share of the memory is {start.share_bytes} bytes, since "
        f"--max-loaded-models and --replicas have {start.num_engines} engines side by side; fewer "
        f"have larger shares)"
    )


def load_libraries() -> None:
    """Imports what most engines need; a broken library is reported by the load."""
    with suppress(Exception):
        import_module("cadenza.loading.build")
        find_backend("auto")


if __name__ == "__main__":
    run_child(sys.argv[1:], load_engine, load_libraries)
