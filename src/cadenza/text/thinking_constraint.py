"""`ThinkingConstraint`: bounds the tokens of a stream's thinking, over a grammar or over any text.

Knows tokens only, no text. Invariant: its state is a function of the tokens that it accepted; a
token is forced only where the constraint below allows it.
"""

from typing import TYPE_CHECKING

from cadenza.structured import ThinkingBound

if TYPE_CHECKING:
    from cadenza.text.token_constraint import GrammarConstraint


class ThinkingConstraint:
    """The constraint of one stream (`core.constraint.Constraint`).

    Args:
        vocab_size: of the model.
        inner: what else is required; None: nothing.
    """

    __slots__ = ("_all", "_bound", "_end", "_has_begun", "_inner", "_is_over", "_num_thought")

    def __init__(
        self, bound: ThinkingBound, vocab_size: int, inner: "GrammarConstraint | None"
    ) -> None:
        num_bytes = -(-vocab_size // 32) * 4
        self._bound = bound
        self._inner = inner
        self._all = b"\xff" * num_bytes
        self._end = (1 << bound.end).to_bytes(num_bytes, "little")
        self._has_begun = bound.begin is None
        self._is_over = False
        self._num_thought = 0

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def has_failed(self) -> bool:
        return self._inner is not None and self._inner.has_failed

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._is_over:
            return
        if not self._has_begun:
            self._has_begun = token_id == self._bound.begin
        elif token_id == self._bound.end:
            self._is_over = True
        else:
            self._num_thought += 1

    def allowed(self) -> bytes:
        allowed = self._all if self._inner is None else self._inner.allowed()
        is_thinking = self._has_begun and not self._is_over
        if is_thinking and self._num_thought >= self._bound.max_tokens and self._may_end(allowed):
            return self._end
        return allowed

    def _may_end(self, allowed: bytes) -> bool:
        """Within a character that is not complete a grammar may not allow it yet."""
        place, bit = divmod(self._bound.end, 8)
        return bool(allowed[place] >> bit & 1)
