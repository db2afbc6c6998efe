"""`Constraint`: which tokens may follow in one stream, as the text so far decides it.

The protocol only: core knows no grammar and no library. A constraint is data of its own sequence.
Its state is a function of the tokens that it accepted, so that it is rebuilt from them wherever the
stream goes on. The token that decides it must be known, so a step that samples a token of a
constrained sequence is read before the next one is scheduled (`engine.loop`).
"""

from collections.abc import Callable
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


class PendingConstraint(Protocol):
    """A constraint that is being compiled on another thread."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Constraint | None:
        """Waits at most `timeout` seconds; None if it cannot be compiled. Raises TimeoutError."""
        ...


CompileConstraint = Callable[[ConstraintSpec], PendingConstraint]
"""Starts compiling a constraint, which has accepted no token."""
