"""What several front ends share of one engine: ids that differ, and settings that agree.

A front end has a number, with which the ids of its requests begin, so that the engine's events tell
whose they are. Plain functions.
"""

from collections.abc import Iterator
from dataclasses import fields
from itertools import count

from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.process.messages import Start
from cadenza.engine.process.process_link import pinned
from cadenza.errors import show

ID_BITS = 32
"""Of an id, those that count the requests of a front end; what is above is its number."""

MAX_FRONT = (1 << 20) - 1
"""Ids stay below 2^52, which any JSON reader keeps exact."""

PLANNED = ("max_num_seqs", "max_model_len", "num_pages")
"""What an engine chooses by its memory where it is not given."""


def ids_of(front: int) -> Iterator[int]:
    """The ids of the requests of a front end."""
    return count(front << ID_BITS)


def front_of(request_id: int) -> int:
    return request_id >> ID_BITS


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
