"""`Recovery`: what a restarted engine gets of the requests that the lost one had, and when.

All open requests are resumed in their order as soon as the engine is loaded, unless some of them
ran in two engines in a row that were lost before they got on: each of those is a suspect, and is
first run alone until it has passed the place at which the engine was lost. If three engines in a
row are lost while the same one runs alone and does not get on, that request is the cause; it is
ended with an error, and what was lost until then says nothing about the others. One loss is not
enough: whatever ends engines at random moments from outside may do so during a trial. Knows no
process and no clock; called on the serving thread. Invariants: while a suspect runs, the engine has
no other request; a request is the cause only if each of the engines told that it had started it.
"""

from collections import deque
from dataclasses import dataclass

from cadenza.engine.batch_engine import Cancel, Command, Resume
from cadenza.engine.open_requests import OpenRequests
from cadenza.events import Finished

MOST_LOSSES = 2
"""A request with which so many engines in a row were lost is not resumed together with others."""

MOST_LOSSES_ALONE = 3
"""A request with which so many in a row were lost that had no other is the cause."""

TRIAL_TOKENS = 8
"""A suspect has passed with so many new tokens of each sample. The engine can be at most two steps
beyond the last token that it told."""

ENGINE_FAILED = (
    "the engine failed each time that it computed this request, the last three times with no "
    "other; do not send it again"
)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A request that runs alone; it has passed once each open sample has so many tokens."""

    request_id: int
    num_tokens: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A request that made the engine fail, and its ends."""

    request_id: int
    ends: list[Finished]


class Recovery:
    """Resumes `requests` after the loss of an engine."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._suspects: deque[int] = deque()
        self._trial: _Trial | None = None
        self._blamed: int | None = None
        self._num_losses_alone = 0
        """Engines in a row that were lost with `_blamed` alone."""
        self.is_done = True

    def lose_engine(self, now_s: float) -> Cause | None:
        """The engine is gone; ends the request that is known to be the cause, if one is."""
        trial, self._trial = self._trial, None
        self._suspects.clear()
        self.is_done = True
        was_running = trial is not None and self._requests.is_running(trial.request_id)
        self._requests.lose_engine(now_s)
        if trial is None or not was_running:
            return None
        self._blame(trial.request_id)
        if self._num_losses_alone < MOST_LOSSES_ALONE:
            return None
        self._acquit()
        ends = self._requests.fail(trial.request_id, "engine_failed", ENGINE_FAILED)
        self._requests.forget_losses()
        return Cause(request_id=trial.request_id, ends=ends)

    def _blame(self, request_id: int) -> None:
        """An engine was lost with this request alone."""
        if not self._requests.num_losses(request_id):  # it got on, or has ended
            self._acquit()
            return
        is_same = request_id == self._blamed
        self._num_losses_alone = self._num_losses_alone + 1 if is_same else 1
        self._blamed = request_id

    def _acquit(self) -> None:
        self._blamed, self._num_losses_alone = None, 0

    def begin(self) -> list[Command]:
        """The next engine is loaded; its first commands."""
        self.is_done = False
        open_ids = self._requests.open_ids()
        suspects = [each for each in open_ids if self._requests.num_losses(each) >= MOST_LOSSES]
        # The blamed one at once again, so that its losses are in a row.
        self._suspects.extend(sorted(suspects, key=lambda each: each != self._blamed))
        return self.advance()

    def advance(self) -> list[Command]:
        """The next commands, once a trial is over. To be called when events have come."""
        commands: list[Command] = []
        if self._trial is not None:
            if not self._has_passed(self._trial):
                return []
            commands += self._withdraw(self._trial.request_id)
            self._trial = None
            self._acquit()
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
