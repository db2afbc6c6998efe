"""`Lookahead`: which tokens a constraint allows behind drafts.

The tokens that decide a mask must be known, so a step gets its masks when the step before it has
been read (`engine.loop`). Invariant: a constraint accepts tokens of its stream only; drafts are
tried on a fork.
"""

from collections.abc import Iterable
from itertools import takewhile

from cadenza.structured import Constraint


class Lookahead:
    """What a constraint allows behind drafts, of which it accepts none.

    `masks` are what may follow: at first, and after each draft that was taken.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._ahead = constraint
        self._is_fork = False
        self.masks = [constraint.allowed()]
        self.is_over = constraint.has_failed
        """No draft may follow."""

    def take(self, token_id: int) -> bool:
        """Takes the next draft; False if it is not allowed, or what may follow it is not known."""
        if self.is_over or not _is_allowed(self.masks[-1], token_id):
            return False
        if not self._is_fork:
            fork = self._ahead.fork()
            if fork is None:
                return False
            self._ahead, self._is_fork = fork, True
        self._ahead.accept(token_id)
        self.is_over = self._ahead.is_complete
        # Behind the end no token is looked at, whatever its mask.
        mask = self.masks[-1] if self.is_over else self._ahead.allowed()
        if self._ahead.has_failed:
            self.is_over = True
            return False
        self.masks.append(mask)
        return True

    def take_all(self, drafts: Iterable[int]) -> int:
        """Takes drafts up to the first that is not allowed; returns how many."""
        return sum(1 for _ in takewhile(self.take, drafts))


def _is_allowed(mask: bytes, token_id: int) -> bool:
    place, bit = divmod(token_id, 8)
    return 0 <= place < len(mask) and bool(mask[place] >> bit & 1)
