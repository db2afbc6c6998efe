"""What several front ends share of one engine: settings that agree. Plain functions."""

from dataclasses import fields

from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.process.messages import Start
from cadenza.engine.process.process_link import pinned
from cadenza.errors import show

PLANNED = ("max_num_seqs", "max_model_len", "num_pages")
"""What an engine chooses by its memory where it is not given."""


def differences(running: Start, limits: EngineLimits, asked: Start) -> list[str]:
    """In what an engine that was started with `running`, and has planned `limits`, is not the one
    that `asked` wants, with both values. What `asked` leaves to the plan may be anything."""
    found: list[str] = []
    if running.model != asked.model:
        found.append(f"model {show(running.model)}, not {show(asked.model)}")
    planned = pinned(running.config, limits)
    for each in fields(EngineConfig):
        has = getattr(running.config, each.name), getattr(planned, each.name)
        wants = getattr(asked.config, each.name)
        is_left = wants is None and each.name in PLANNED
        if wants not in has and not is_left:
            found.append(f"{each.name} {show(has[-1])}, not {show(wants)}")
    return found
