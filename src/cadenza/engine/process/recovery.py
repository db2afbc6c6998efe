"""`Recovery`: which open requests a restarted engine resumes, and when: all at once, in order, but
for those that ran in two engines in a row lost without progress; each of these first runs alone
until past the index of the loss. If three engines in a row are lost with it alone, it is the cause
and ends with an error. A request is the cause only if each engine reported its start."""

from collections import deque
from dataclasses import dataclass

from cadenza.engine.batch_engine import Cancel, Command, Resume
from cadenza.engine.open_requests import OpenRequests
from cadenza.events import Finished

# A request with which so many engines in a row were lost is not resumed together with others.
MOST_LOSSES = 2

# A request with which so many in a row were lost that had no other is the cause.
MOST_LOSSES_ALONE = 3

# New tokens of each sample with which a quarantined request has passed. An engine is at most two
# steps beyond the last token that it reported.
TRIAL_TOKENS = 8

ENGINE_FAILED = (
    "the engine failed each time that it computed this request, the last three times with no "
    "other; do not send it again"
)


@dataclass(frozen=True, slots=True)
class _Trial:
    """It has passed once each open sample has so many tokens."""

    request_id: int
    num_tokens: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`ends`: the final events of a request that made the engine fail."""

    request_id: int
    ends: list[Finished]


class Recovery:
    """Resumes `requests` after the loss of an engine."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._quarantined: deque[int] = deque()
        self._trial: _Trial | None = None
        self._last_alone: int | None = None
        self._num_losses_alone = 0  # Engines in a row that were lost with `_last_alone` alone
        self.is_done = True

    def lose_engine(self, now_s: float) -> Cause | None:
        """Ends the request that is known to be the cause, if one is."""
        trial, self._trial = self._trial, None
        self._quarantined.clear()
        self.is_done = True
        was_running = trial is not None and self._requests.is_running(trial.request_id)
        self._requests.lose_engine(now_s)
        if trial is None or not was_running:
            return None
        self._count_loss_alone(trial.request_id)
        if self._num_losses_alone < MOST_LOSSES_ALONE:
            return None
        self._forget_losses_alone()
        ends = self._requests.fail(trial.request_id, "engine_failed", ENGINE_FAILED)
        self._requests.reset_losses()
        return Cause(request_id=trial.request_id, ends=ends)

    def _count_loss_alone(self, request_id: int) -> None:
        if not self._requests.num_losses(request_id):  # it got on, or has ended
            self._forget_losses_alone()
            return
        is_same = request_id == self._last_alone
        self._num_losses_alone = self._num_losses_alone + 1 if is_same else 1
        self._last_alone = request_id

    def _forget_losses_alone(self) -> None:
        self._last_alone, self._num_losses_alone = None, 0

    def begin(self) -> list[Command]:
        self.is_done = False
        open_ids = self._requests.open_ids()
        quarantined = [each for each in open_ids if self._requests.num_losses(each) >= MOST_LOSSES]
        # The one that was alone last at once again, so that its losses are in a row.
        self._quarantined.extend(sorted(quarantined, key=lambda each: each != self._last_alone))
        return self.advance()

    def advance(self) -> list[Command]:
        """Called when events have come."""
        commands: list[Command] = []
        if self._trial is not None:
            if not self._has_passed(self._trial):
                return []
            commands += self._withdraw(self._trial.request_id)
            self._trial = None
            self._forget_losses_alone()
        while self._quarantined:
            request_id = self._quarantined.popleft()
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
        is_open = bool(self._requests.num_tokens_of(request_id))
        self._requests.withdraw(request_id)
        return [Cancel(request_id, None)] if is_open else []

    def _resume(self, request_id: int) -> list[Command]:
        resumed = self._requests.resume(request_id)
        return [] if resumed is None else [Resume(request_id, *resumed)]
