"""`ThinkingConstraint`: bounds the tokens of a stream's thinking, over a grammar or over any text.
Invariant: a function of the accepted tokens; it forces only a token that the constraint below
allows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cadenza.structured import Constraint, ThinkingBound


class Thought(NamedTuple):
    """How far the thinking of a stream has come; `last` are its newest tokens outside thinking."""

    has_begun: bool
    is_over: bool = False
    num_tokens: int = 0
    last: tuple[int, ...] = ()


class ThinkingConstraint:
    """A `structured.Constraint` over `inner`, if there is one; `thought` is what has been accepted
    so far."""

    __slots__ = ("_bound", "_inner", "_thought", "_vocab_size")

    def __init__(
        self,
        bound: ThinkingBound,
        vocab_size: int,
        inner: Constraint | None,
        thought: Thought | None = None,
    ) -> None:
        self._bound = bound
        self._vocab_size = vocab_size
        self._inner = inner
        self._thought = thought or Thought(has_begun=bound.begin is None)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def has_failed(self) -> bool:
        return self._inner is not None and self._inner.has_failed

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        thought = self._thought
        if thought.is_over:
            return
        if not thought.has_begun:
            self._thought = self._outside(thought, token_id)
        elif token_id == self._bound.end:
            is_over = not self._bound.recurs
            self._thought = thought._replace(is_over=is_over, has_begun=is_over, last=())
        else:
            self._thought = thought._replace(num_tokens=thought.num_tokens + 1)

    def allowed(self) -> bytes:
        num_bytes = -(-self._vocab_size // 32) * 4
        allowed = b"\xff" * num_bytes if self._inner is None else self._inner.allowed()
        if self._is_spent and self._may_end(allowed):
            return (1 << self._bound.end).to_bytes(num_bytes, "little")
        return allowed

    def forced(self) -> Sequence[int]:
        return () if self._inner is None or self._is_spent else self._inner.forced()

    def fork(self) -> "ThinkingConstraint | None":
        inner = None if self._inner is None else self._inner.fork()
        if inner is None and self._inner is not None:
            return None
        return ThinkingConstraint(self._bound, self._vocab_size, inner, self._thought)

    @property
    def _is_spent(self) -> bool:
        thought = self._thought
        is_thinking = thought.has_begun and not thought.is_over
        return is_thinking and thought.num_tokens >= self._bound.max_tokens

    def _may_end(self, allowed: bytes) -> bool:
        """Within a character that is not complete a grammar may not allow it yet."""
        place, bit = divmod(self._bound.end, 8)
        return bool(allowed[place] >> bit & 1)

    def _outside(self, thought: Thought, token_id: int) -> Thought:
        """What follows a token that is in front of thinking."""
        before = self._bound.before
        if token_id == self._bound.begin and thought.last == before:
            return thought._replace(has_begun=True)
        last = (*thought.last, token_id)[-len(before) :] if before else ()
        return thought._replace(last=last)
