"""`LoadedModel`: a warm engine in this process and the text front end of its checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from cadenza.backends import BACKENDS, Backends
from cadenza.checkpoint import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.core import EngineCore
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import OnPhaseDone, build_core, open_planned
from cadenza.loading.plan import EnginePlan


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedModel:
    """The result of `load_model`; the caller must call `close`."""

    checkpoint: Checkpoint
    plan: EnginePlan
    core: EngineCore
    text: TextFrontend

    def close(self) -> None:
        self.core.close()


def load_model(
    model: str | Path | None,
    config: EngineConfig,
    on_phase: OnPhaseDone = lambda _: None,
    *,
    backends: Backends = BACKENDS,
) -> LoadedModel:
    """Opens a checkpoint and its text front end, then loads, compiles and warms up an engine.

    Args:
        backends: the backends that `config.backend` selects from.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: as their docstrings say.
    """
    checkpoint, plan = open_planned(model, config, backends)
    text = open_text(checkpoint, config, plan.limits.max_model_len)
    core = build_core(checkpoint, plan, config, on_phase, backends=backends)
    return LoadedModel(checkpoint=checkpoint, plan=plan, core=core, text=text)


def open_text(
    checkpoint: Checkpoint, config: EngineConfig, max_model_len: int | None = None
) -> TextFrontend:
    """The text front end of a checkpoint, configured by `config`. Raises CheckpointError."""
    return TextFrontend(
        checkpoint, generation_config=config.generation_config, max_model_len=max_model_len
    )
