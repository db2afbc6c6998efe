"""From a model's name and options to a warm engine. The one place that knows every layer.

The backend is the one that the options choose among `backends`, and is imported then: nothing heavy
is loaded before a model is.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend, resolve_backend
from cadenza.backends.base import BackendTraits, Runner, RunnerSetup
from cadenza.checkpoint import Checkpoint, Hub, ModelConfig, is_hub_id, open_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.memory import available_memory_bytes
from cadenza.engine.plan import EnginePlan, make_plan
from cadenza.engine.reference import ReferenceEngine
from cadenza.engine.text_face import TextFace
from cadenza.errors import CheckpointError, ConfigError, show

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]
"""Told "load" when the weights are in place and "compile" when the programs are warm."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A warm engine and the text side of its checkpoint."""

    checkpoint: Checkpoint
    plan: EnginePlan
    core: EngineCore
    text: TextFace

    def close(self) -> None:
        self.core.close()


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


def load_model(
    model: str | Path | None,
    config: EngineConfig,
    on_phase: OnPhase = lambda _: None,
    *,
    backends: Backends = BACKENDS,
) -> LoadedModel:
    """Loads, compiles and warms up; `on_phase` hears how far it is.

    Args:
        backends: among which `config.backend` chooses.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: as their docstrings say.
    """
    resolve_backend(config.backend, backends)  # a wrong name is told before anything is fetched
    checkpoint = find_checkpoint(model, revision=config.revision)
    plan = plan_model(checkpoint, config, backends)
    text = open_text(checkpoint, config, plan.limits.max_model_len)
    logger.info("%s", plan.summary)
    logger.debug("resolved configuration: %s", plan)
    runner = load_runner(checkpoint, plan, config, backends=backends)
    on_phase("load")
    runner.warmup()
    on_phase("compile")
    core = EngineCore(
        runner,
        plan.limits,
        CoreOptions(
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            loop=config.scheduler,
            seed=config.seed,
        ),
    )
    return LoadedModel(checkpoint=checkpoint, plan=plan, core=core, text=text)


def open_text(
    checkpoint: Checkpoint, config: EngineConfig, max_model_len: int | None = None
) -> TextFace:
    """The checkpoint's text side, as the options ask for it. Raises CheckpointError."""
    return TextFace(
        checkpoint, generation_config=config.generation_config, max_model_len=max_model_len
    )


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


def build_reference(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    max_model_len: int,
    backends: Backends = BACKENDS,
) -> ReferenceEngine:
    """The independent reference over the same checkpoint, in float32.

    Raises:
        CheckpointError: the model has fewer positions.
        ConfigError: the chosen backend has no independent model.
    """
    if max_model_len > checkpoint.config.max_position_embeddings:
        raise CheckpointError(
            f"the model has {checkpoint.config.max_position_embeddings} positions; "
            f"{max_model_len} were asked for"
        )
    backend = find_backend(config.backend, backends)
    witness = backend.load_witness(checkpoint.config, checkpoint.weights, max_model_len)
    if witness is None:
        raise ConfigError(
            f"the {resolve_backend(config.backend, backends)} backend has no independent "
            f"reference model to compare with; use --reference solo"
        )
    return ReferenceEngine(
        witness, max_model_len=max_model_len, eos_token_ids=checkpoint.eos_token_ids
    )


def cache_folder() -> Path:
    """Where Cadenza keeps what it can make again: `CADENZA_CACHE_DIR`, or the user's cache."""
    chosen = os.environ.get("CADENZA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cadenza"
