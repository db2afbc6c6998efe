"""From a model's name and options to a warm engine; text is the front end's.

The backend is the one that the options choose among `backends`, and is imported then: nothing heavy
is loaded before a model is.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend, resolve_backend
from cadenza.backends.base import BackendTraits, Runner, RunnerSetup
from cadenza.checkpoint import Checkpoint, Hub, ModelConfig, is_hub_id, open_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import CheckpointError, ConfigError, show
from cadenza.loading.memory import available_memory_bytes
from cadenza.loading.plan import EnginePlan, make_plan

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]
"""Told "load" when the weights are in place and "compile" when the programs are warm."""


def find_checkpoint(
    model: str | Path | None, *, revision: str | None = None, hub: Hub | None = None
) -> Checkpoint:
    """Opens a model folder, or fetches the hub's model `owner/model`; None is the bundled model.

    Raises:
        CheckpointError: there is no such model, or it is not supported.
        ConfigError: a revision of what is not on the hub.
    """
    is_local = model is None or _exists(model) or isinstance(model, Path)
    if not is_local and is_hub_id(str(model)):
        snapshot = (hub or Hub()).fetch(str(model), revision)
        return open_checkpoint(snapshot.folder, revision=snapshot.commit)
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} names a commit of a hub model; "
            f"{model or 'the bundled model'} is not one: leave it out"
        )
    return open_checkpoint(None if model is None else Path(model))


def _exists(name: object) -> bool:
    """Raises CheckpointError where `name` can be no path at all."""
    if not isinstance(name, str | Path) or not str(name):
        raise CheckpointError(
            f"the model is {show(name)}; name a folder, or a model of the hub as owner/model"
        )
    try:
        return Path(name).exists()
    except (OSError, ValueError) as error:  # say too long, or not to be looked into
        raise CheckpointError(
            f"the model {show(name)} cannot be looked for; name a folder, or a model of the hub "
            f"as owner/model"
        ) from error


def describe_backend(
    config: EngineConfig, model: ModelConfig, backends: Backends = BACKENDS
) -> BackendTraits:
    """What the chosen backend would be like. Raises ConfigError, DeviceUnavailableError."""
    return find_backend(config.backend, backends).describe(config.device, config.ops, model)


def plan_model(
    checkpoint: Checkpoint, config: EngineConfig, backends: Backends = BACKENDS
) -> EnginePlan:
    """The plan under the memory that is free now; allocates nothing."""
    traits = describe_backend(config, checkpoint.config, backends)
    available = available_memory_bytes()
    if traits.device_memory_bytes is not None:
        available = traits.device_memory_bytes
    return make_plan(config, checkpoint, traits, available)


def open_planned(
    model: str | Path | None, config: EngineConfig, backends: Backends = BACKENDS
) -> tuple[Checkpoint, EnginePlan]:
    """The checkpoint, and the plan for it, before anything is loaded.

    Args:
        backends: among which `config.backend` chooses.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: as their docstrings say.
    """
    resolve_backend(config.backend, backends)  # a wrong name is told before anything is fetched
    checkpoint = find_checkpoint(model, revision=config.revision)
    return checkpoint, plan_model(checkpoint, config, backends)


def build_core(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    on_phase: OnPhase = lambda _: None,
    *,
    backends: Backends = BACKENDS,
) -> EngineCore:
    """A warm engine after a plan; `on_phase` hears how far it is."""
    logger.info("%s", plan.summary)
    logger.debug("resolved configuration: %s", plan)
    runner = load_runner(checkpoint, plan, config, backends=backends)
    on_phase("load")
    runner.warmup()
    on_phase("compile")
    options = CoreOptions(
        eos_token_ids=frozenset(checkpoint.eos_token_ids), loop=config.scheduler, seed=config.seed
    )
    return EngineCore(runner, plan.limits, options)


def build_runner(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    *,
    fill: float = 0.0,
    backends: Backends = BACKENDS,
) -> Runner:
    """A warm runner; KV slots start as `fill`."""
    runner = load_runner(checkpoint, plan, config, fill=fill, backends=backends)
    runner.warmup()
    return runner


def load_runner(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    *,
    fill: float = 0.0,
    backends: Backends = BACKENDS,
) -> Runner:
    """A runner with its weights in place, of which nothing is compiled yet."""
    setup = RunnerSetup(
        limits=plan.limits,
        device=config.device,
        ops=config.ops,
        dtype=plan.dtype,
        fill=fill,
        cache_folder=cache_folder(),
    )
    backend = find_backend(config.backend, backends)
    return backend.load_runner(checkpoint.config, checkpoint.weights, setup)


def cache_folder() -> Path:
    """Where Cadenza keeps what it can make again: `CADENZA_CACHE_DIR`, or the user's cache."""
    chosen = os.environ.get("CADENZA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cadenza"
