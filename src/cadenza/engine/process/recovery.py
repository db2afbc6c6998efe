"""`Recovery`: what a restarted engine gets of the requests that the lost one had, and when.

All open requests are resumed in their order as soon as the engine is loaded, unless some of them
ran in two crashes: each of those is a suspect, and is first run alone until it has passed the place
at which the engine was lost. If the engine is lost while one runs alone, that request is the cause;
it is ended with an error, and the crashes in which it ran say nothing about the others. Knows no
process and no clock; called on the serving thread. Invariants: while a suspect runs, the engine has
no other request; a request is the cause only if the engine told that it had started it.
"""

from collections import deque
from dataclasses import dataclass

from cadenza.engine.batch_engine import Cancel, Command, Resume
from cadenza.engine.open_requests import OpenRequests
from cadenza.events import Finished

MOST_CRASHES = 2
"""A request that ran in so many is not resumed together with others."""

TRIAL_TOKENS = 8
"""A suspect has passed with so many new tokens of each sample. The engine can be at most two steps
beyond the last token that it told."""

ENGINE_FAILED = (
    "the engine failed each time that it computed this request, the last time with no other; do "
    "not send it again"
)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A request that runs alone; it has passed once each open sample has so many tokens."""

    request_id: int
    num_tokens: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A request that made the engine fail, and the crashes that it explains."""

    request_id: int
    ends: list[Finished]
    crashes_s: tuple[float, ...]


class Recovery:
    """Resumes `requests` after the loss of an engine."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._suspects: deque[int] = deque()
        self._trial: _Trial | None = None
        self.is_done = True

    def lose_engine(self, now_s: float) -> Cause | None:
        """The engine is gone; ends the request that is known to be the cause, if one is."""
        trial, self._trial = self._trial, None
        self._suspects.clear()
        self.is_done = True
        is_cause = trial is not None and self._requests.is_running(trial.request_id)
        self._requests.lose_engine(now_s)
        if trial is None or not is_cause:
            return None
        crashes_s = self._requests.crashes_s(trial.request_id)
        ends = self._requests.fail(trial.request_id, "engine_failed", ENGINE_FAILED)
        self._requests.forget_crashes(crashes_s)
        return Cause(request_id=trial.request_id, ends=ends, crashes_s=crashes_s)

    def begin(self) -> list[Command]:
        """The next engine is loaded; its first commands."""
        self.is_done = False
        open_ids = self._requests.open_ids()
        self._suspects.extend(
            each for each in open_ids if len(self._requests.crashes_s(each)) >= MOST_CRASHES
        )
        return self.advance()

    def advance(self) -> list[Command]:
        """The next commands, once a trial is over. To be called when events have come."""
        commands: list[Command] = []
        if self._trial is not None:
            if not self._has_passed(self._trial):
                return []
            commands += self._withdraw(self._trial.request_id)
            self._trial = None
        while self._suspects:
            request_id = self._suspects.popleft()
            resumed = self._resume(request_id)
            if resumed:
                counts = self._requests.num_tokens_of(request_id)
                targets = {sample: count + TRIAL_TOKENS for sample, count in counts.items()}
                self._trial = _Trial(request_id, targets)
                return commands + resumed
        if not self.is_done:
            self.is_done = True
            for request_id in self._requests.open_ids():
                commands += self._resume(request_id)
        return commands

    def _has_passed(self, trial: _Trial) -> bool:
        counts = self._requests.num_tokens_of(trial.request_id)
        return all(count >= trial.num_tokens[sample] for sample, count in counts.items())

    def _withdraw(self, request_id: int) -> list[Command]:
        """Takes a request that has passed its trial out of the engine; empty if it has ended."""
        is_open = bool(self._requests.num_tokens_of(request_id))
        self._requests.withdraw(request_id)
        return [Cancel(request_id, None)] if is_open else []

    def _resume(self, request_id: int) -> list[Command]:
        resumed = self._requests.resume(request_id)
        return [] if resumed is None else [Resume(request_id, *resumed)]
