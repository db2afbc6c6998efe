"""`ModelTurns`: which of a server's models are loaded, and which one makes room for another: a
state machine without a clock, an engine or an event loop; the time is passed in, and what is to
be done comes back as `Moves`. Invariant: at most `max_loaded` models are loaded, loading or not
yet unloaded."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

IDLE_S = 1.0  # a model that was used less than this ago counts as in use: its client may call again
TURN_S = 5.0

ModelState = Literal["unloaded", "loading", "ready", "draining", "unloading"]
"""`draining`: its open calls continue, new ones wait, for another model needs its place."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingCall:
    """`number`: in order of arrival over all models; `end` ends its wait, with an error or none."""

    number: int
    end: Callable[[Any], object]


@dataclass(slots=True, eq=False)
class ModelTurn:
    """The state of one model."""

    state: ModelState = "unloaded"
    num_calls: int = 0  # that were admitted and have not ended
    # not admitted yet, in the order of arrival
    waiting: deque[WaitingCall] = field(default_factory=deque[WaitingCall])
    ready_s: float = 0.0  # when it was loaded
    used_s: float = 0.0  # when its last call ended, or it was loaded
    load_s: float = 0.0  # how long its last load took

    @property
    def is_loaded(self) -> bool:
        return self.state in ("ready", "draining")

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.num_calls

    @property
    def first_number(self) -> int:
        return self.waiting[0].number

    def began(self, now_s: float) -> None:
        self.state, self.ready_s = "loading", now_s

    def loaded(self, now_s: float) -> None:
        self.load_s = now_s - self.ready_s
        self.state, self.ready_s, self.used_s = "ready", now_s, now_s

    def gone(self) -> None:
        self.state = "unloaded"

    def entered(self) -> None:
        self.num_calls += 1

    def left(self, now_s: float) -> None:
        self.num_calls -= 1
        self.used_s = now_s

    @property
    def free_s(self) -> float:
        """When it may make room for another model, if nothing changes until then."""
        turn_ends_s = self.ready_s + max(TURN_S, self.load_s)
        return min(self.used_s + IDLE_S, turn_ends_s) if self.is_idle else turn_ends_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What is to be done now; `look_at_s` is when to ask again at the latest."""

    load: Sequence[ModelTurn] = ()
    unload: Sequence[ModelTurn] = ()
    idle: Sequence[ModelTurn] = ()
    look_at_s: float | None = None


class ModelTurns:
    """The rules for all models of a server:

    - The model whose first call has waited longest is loaded first.
    - Where no place is free, a loaded model makes room: it takes no further calls, and is unloaded
      when its open ones have ended. One unused for `IDLE_S` does so at once, the longest idle
      first; one in use after a turn, the one loaded longest first.
    - A turn is `TURN_S`, or the time of the model's load if longer, so that at most half of the
      time in which models take turns goes into loading.
    - A model whose place is not needed after all, as those that waited have left, continues.

    Args:
        max_loaded: models that may be loaded at the same time.
        idle_unload_s: a model that was not used for so long is unloaded; None: never.
    """

    def __init__(
        self, turns: Sequence[ModelTurn], max_loaded: int, idle_unload_s: float | None = None
    ) -> None:
        self._turns = turns
        self._max_loaded = max_loaded
        self._idle_unload_s = idle_unload_s

    def advance(self, now_s: float) -> Moves:
        """Changes the states as the rules say. To be called after each change, and in time."""
        wanted = sorted(
            (each for each in self._turns if each.state == "unloaded" and each.waiting),
            key=lambda each: each.first_number,
        )
        taken = [each for each in self._turns if each.state != "unloaded"]
        begun = wanted[: max(0, self._max_loaded - len(taken))]
        for each in begun:
            each.began(now_s)
        num_coming = len([each for each in taken if each.state == "unloading"])
        num_missing = max(0, len(wanted) - len(begun) - num_coming)
        looks_s = self._make_room(num_missing, now_s)
        idle = self._find_idle(now_s)
        looks_s += [] if self._idle_unload_s is None else self._idle_ends_s()
        unload = [each for each in self._turns if each.state == "draining" and each.is_idle]
        for each in (*unload, *idle):
            each.state = "unloading"
        return Moves(
            load=begun,
            unload=unload,
            idle=idle,
            look_at_s=min((at_s for at_s in looks_s if at_s > now_s), default=None),
        )

    def _make_room(self, num_missing: int, now_s: float) -> list[float]:
        """Drains as many models as places are missing, and no others; when more of them may be."""
        loaded = sorted(
            (each for each in self._turns if each.is_loaded),
            key=lambda each: (
                each.state != "draining",
                not each.is_idle,
                each.used_s if each.is_idle else each.ready_s,
            ),
        )
        looks_s: list[float] = []
        for each in loaded:
            is_free = each.state == "draining" or each.free_s <= now_s
            if num_missing > 0 and is_free:
                each.state = "draining"
                num_missing -= 1
                continue
            each.state = "ready"
            if num_missing > 0:
                looks_s.append(each.free_s)
        return looks_s

    def _find_idle(self, now_s: float) -> list[ModelTurn]:
        if self._idle_unload_s is None:
            return []
        return [
            each
            for each in self._turns
            if each.state == "ready"
            and each.is_idle
            and not each.waiting
            and now_s >= each.used_s + self._idle_unload_s
        ]

    def _idle_ends_s(self) -> list[float]:
        assert self._idle_unload_s is not None
        return [
            each.used_s + self._idle_unload_s
            for each in self._turns
            if each.state == "ready" and each.is_idle
        ]
