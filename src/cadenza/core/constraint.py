"""`Constraint`: which tokens may follow in one stream, as the text so far decides it; `Lookahead`:
which may follow behind drafts.

The protocol only: core knows no grammar and no library. A constraint is data of its own sequence.
Its state is a function of the tokens that it accepted, so that it is rebuilt from them wherever the
stream goes on. The tokens that decide a mask must be known, so a step gets its masks when the step
before it has been read (`engine.loop`). Invariant: a constraint accepts tokens of its stream only;
drafts are tried on a fork.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from cadenza.structured import ConstraintSpec


class Constraint(Protocol):
    """The constraint of one sequence."""

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow: the stream ends after its last token."""
        ...

    @property
    def has_failed(self) -> bool:
        """True if it cannot go on: a limit was reached, or a token was accepted that it forbids."""
        ...

    def accept(self, token_id: int) -> None:
        """Takes the stream's next token."""
        ...

    def allowed(self) -> bytes:
        """One bit for each token of the vocabulary, the least significant first; bits beyond the
        vocabulary have no meaning."""
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as it is known that no others may follow."""
        ...

    def fork(self) -> "Constraint | None":
        """A constraint of the same state, to try drafts on, until the next fork is made; None as
        long as it is being compiled.

        Nothing that it accepts, and no limit that it reaches, changes this one.
        """
        ...


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


class PendingConstraint(Protocol):
    """A constraint that is being compiled on another thread."""

    def done(self) -> bool: ...

    def cancel(self) -> bool:
        """Not to be compiled any more; False if that has begun. Nothing may be asked of it then."""
        ...

    def result(self, timeout: float | None = None) -> Constraint | None:
        """Waits at most `timeout` seconds; None if it cannot be compiled. Raises TimeoutError."""
        ...


CompileConstraint = Callable[[ConstraintSpec], PendingConstraint]
"""Starts compiling a constraint, which has accepted no token."""
