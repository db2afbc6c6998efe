"""From a model's name and options to a warm engine. The one place that knows every layer.

A backend is imported on use: nothing heavy is loaded before a model is.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cadenza.backends.base import BackendTraits, Runner
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


def resolve_backend(config: EngineConfig) -> Literal["xla"]:
    """`auto` is the best backend that is built; there is one."""
    return "xla" if config.backend == "auto" else config.backend


def describe_backend(config: EngineConfig, model: ModelConfig) -> BackendTraits:
    """What the chosen backend would be like. Raises ConfigError, DeviceUnavailableError."""
    match resolve_backend(config):
        case "xla":
            from cadenza.backends.xla.traits import describe

            return describe(config.device, config.ops, model)


def plan_model(checkpoint: Checkpoint, config: EngineConfig) -> EnginePlan:
    """The plan under the memory that is free now; allocates nothing."""
    traits = describe_backend(config, checkpoint.config)
    available = available_memory_bytes()
    if traits.device_memory_bytes is not None:
        available = traits.device_memory_bytes
    return make_plan(config, checkpoint, traits, available)


def load_model(
    model: str | Path | None, config: EngineConfig, on_phase: OnPhase | None = None
) -> LoadedModel:
    """Loads, compiles and warms up; `on_phase` hears how far it is.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: as their docstrings say.
    """
    checkpoint = find_checkpoint(model, revision=config.revision)
    plan = plan_model(checkpoint, config)
    text = open_text(checkpoint, config, plan.limits.max_model_len)
    logger.info("%s", plan.summary)
    logger.debug("resolved configuration: %s", plan)
    runner = build_runner(checkpoint, plan, config, on_phase=on_phase)
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
    on_phase: OnPhase | None = None,
) -> Runner:
    """A warm runner; KV slots start as `fill`."""
    runner = load_runner(checkpoint, plan, config, fill=fill)
    if on_phase is not None:
        on_phase("load")
    runner.warmup()
    if on_phase is not None:
        on_phase("compile")
    return runner


def load_runner(
    checkpoint: Checkpoint, plan: EnginePlan, config: EngineConfig, *, fill: float = 0.0
) -> Runner:
    """A runner with its weights in place, of which nothing is compiled yet."""
    match resolve_backend(config):
        case "xla":
            return _load_xla_runner(checkpoint, plan, config, fill=fill)


def _load_xla_runner(
    checkpoint: Checkpoint, plan: EnginePlan, config: EngineConfig, *, fill: float
) -> Runner:
    from cadenza.backends.xla.device import find_device
    from cadenza.backends.xla.runner import RunnerOptions, XlaRunner, enable_compilation_cache
    from cadenza.backends.xla.traits import find_ops

    enable_compilation_cache(cache_folder() / "xla")
    return XlaRunner(
        checkpoint.config,
        checkpoint.weights,
        plan.limits,
        RunnerOptions(
            device=config.device,
            dtype=plan.dtype,
            make_ops=find_ops(config.ops, find_device(config.device), checkpoint.config),
            fill=fill,
        ),
    )


def watch_compiles() -> Callable[[], int]:
    """Counts programs compiled in this process from now on; for a process's only engine."""
    from cadenza.backends.xla.compile_count import CompileCount

    return CompileCount()


def build_reference(checkpoint: Checkpoint, *, max_model_len: int) -> ReferenceEngine:
    """The independent reference over the same checkpoint, in float32."""
    from cadenza.backends.xla.reference_model import ReferenceModel

    if max_model_len > checkpoint.config.max_position_embeddings:
        raise CheckpointError(
            f"the model has {checkpoint.config.max_position_embeddings} positions; "
            f"{max_model_len} were asked for"
        )
    return ReferenceEngine(
        ReferenceModel(checkpoint.config, checkpoint.weights, max_model_len),
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
    )


def cache_folder() -> Path:
    """Where Cadenza keeps what it can make again: `CADENZA_CACHE_DIR`, or the user's cache."""
    chosen = os.environ.get("CADENZA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cadenza"
