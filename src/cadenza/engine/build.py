"""From a model's name and options to a warm engine. The one place that knows every layer.

A backend is imported on use: nothing heavy is loaded before a model is.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cadenza.backends.base import BackendTraits, Runner
from cadenza.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.memory import available_memory_bytes
from cadenza.engine.plan import EnginePlan, make_plan
from cadenza.engine.reference import ReferenceEngine
from cadenza.engine.text_face import TextFace
from cadenza.errors import CheckpointError

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


def find_checkpoint(model: str | Path | None) -> Checkpoint:
    """Opens a model folder; None is the bundled model. Raises CheckpointError."""
    return open_checkpoint(None if model is None else Path(model))


def describe_backend(config: EngineConfig, model: ModelConfig) -> BackendTraits:
    """What the chosen backend would be like. Raises ConfigError, DeviceUnavailableError."""
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
    checkpoint = find_checkpoint(model)
    text = TextFace(checkpoint)
    plan = plan_model(checkpoint, config)
    logger.info("resolved configuration: %s", plan)
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


def build_runner(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    *,
    fill: float = 0.0,
    on_phase: OnPhase | None = None,
) -> Runner:
    """A warm runner; KV slots start as `fill`."""
    from cadenza.backends.xla.device import find_device
    from cadenza.backends.xla.runner import RunnerOptions, XlaRunner, enable_compilation_cache
    from cadenza.backends.xla.traits import find_ops

    enable_compilation_cache(cache_folder() / "xla")
    runner = XlaRunner(
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
    if on_phase is not None:
        on_phase("load")
    runner.warmup()
    if on_phase is not None:
        on_phase("compile")
    return runner


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
