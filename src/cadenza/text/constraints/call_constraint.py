"""Constraints around others. `CallConstraint`: any text, in which each call that begins is one of a
grammar; where it cannot be followed, the text goes on unconstrained, or, where calls must be of the
grammar, fails. `ThinkingConstraint` bounds the tokens of thinking. Invariant: what they allow is a
function of the accepted tokens, and nothing is forced that the constraint below does not allow."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cadenza.structured import CallRule, Constraint, ThinkingBound

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_BEGIN_CHARS = 512
"""Of a call's beginning; of so many last characters it is known whether one is in them."""


class CallWatch:
    """Finds the beginnings of calls (`rule`) in the text of a stream's tokens, of which `text` is
    the end; `thinking` None: it is not decided whether it begins with reasoning."""

    __slots__ = ("_begin", "_rule", "_text", "_thinking", "_tokens")

    def __init__(
        self,
        rule: CallRule,
        tokens: "LLTokenizer",
        text: bytes = b"",
        *,
        thinking: bool | None = None,
    ) -> None:
        self._rule = rule
        self._tokens = tokens
        self._begin = re.compile(rule.begin.encode())
        self._text: bytes = text
        self._thinking = thinking
        if rule.reasoning is None:
            self._thinking = False
        elif rule.has_begun and thinking is None:
            self._thinking = True

    @property
    def is_needed(self) -> bool:
        return self._rule.is_needed

    def copy(self) -> "CallWatch":
        return CallWatch(self._rule, self._tokens, self._text, thinking=self._thinking)

    def push(self, token_id: int) -> list[int] | None:
        """The text so far, as tokens, of a call whose beginning this token completes, if it
        does."""
        piece: bytes = self._tokens.decode_bytes([token_id])
        self._text += piece
        if self._is_thinking():
            return None
        found = self._begin.search(self._text)
        if found is None:
            self._text = self._text[-MAX_BEGIN_CHARS:]
            return None
        rest = self._text[found.start() if self._rule.is_read else found.end() :]
        self._text = self._text[found.end() :]
        try:
            return self._tokens.greedy_tokenize(rest.decode())
        except UnicodeDecodeError:
            return None  # no call goes on with a part of a character

    def _is_thinking(self) -> bool:
        if self._thinking is False:
            return False
        assert self._rule.reasoning is not None
        begin, end = (mark.encode() for mark in self._rule.reasoning)
        if self._thinking is None:
            stripped = self._text.lstrip()
            if not stripped.startswith(begin):
                self._thinking = None if begin.startswith(stripped) else False
                return self._thinking is None
            self._thinking, self._text = True, stripped[len(begin) :]
        _, mark, behind = self._text.partition(end)
        if mark:
            self._thinking, self._text = False, behind
        else:
            self._text = self._text[-len(end) :]
        return bool(self._thinking)


class RestartableConstraint(Constraint, Protocol):
    """The constraint of one call, which is that of the next one, too."""

    def restart(self) -> None: ...

    def begin_with(self, token_ids: Sequence[int]) -> bool: ...

    def fork(self) -> "RestartableConstraint | None": ...


class CallConstraint:
    """A `structured.Constraint`. `watch` None: nothing is constrained any more. `call` None: none
    can be followed, as in a fork for drafts outside a call, which may not go on into one.
    `is_fork`: `call` has accepted the beginning of one."""

    __slots__ = ("_any", "_call", "_has_failed", "_is_fork", "_is_in_call", "_vocab_size", "_watch")

    def __init__(
        self,
        watch: CallWatch | None,
        call: RestartableConstraint | None,
        vocab_size: int,
        *,
        is_fork: bool = False,
    ) -> None:
        self._watch = watch
        self._call = call
        self._is_in_call = self._is_fork = is_fork
        self._vocab_size = vocab_size
        self._any = b"\xff" * (-(-vocab_size // 32) * 4)
        self._has_failed = False

    @property
    def is_complete(self) -> bool:
        return False  # after a call there may be text

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def accept(self, token_id: int) -> None:
        if self._watch is None:
            return
        if self._is_in_call and self._call is not None:
            self._call.accept(token_id)
            self._leave_if_over(self._call)
            return
        rest = self._watch.push(token_id)
        if rest is None:
            return
        if self._call is None:
            self._has_failed = True
            return
        self._is_in_call = self._call.begin_with(rest)
        if self._is_in_call:
            self._leave_if_over(self._call)
        elif self._watch.is_needed:
            self._has_failed = True

    def allowed(self) -> bytes:
        if self._watch is None or not self._is_in_call or self._call is None:
            return self._any
        mask = self._call.allowed()
        self._leave_if_over(self._call)
        return mask if self._is_in_call else self._any

    def forced(self) -> Sequence[int]:
        self.allowed()
        return self._call.forced() if self._is_in_call and self._call is not None else ()

    def fork(self) -> "CallConstraint | None":
        watch = None if self._watch is None else self._watch.copy()
        if not self._is_in_call or self._call is None:
            return CallConstraint(watch, None, self._vocab_size)
        call = self._call.fork()
        return None if call is None else CallConstraint(watch, call, self._vocab_size, is_fork=True)

    def _leave_if_over(self, call: RestartableConstraint) -> None:
        if call.has_failed:
            self._has_failed = self._is_fork or (self._watch is not None and self._watch.is_needed)
            self._watch, self._is_in_call = None, False
        elif call.is_complete:
            self._is_in_call = False
            if self._is_fork:
                self._call = None
            else:
                call.restart()


class Thought(NamedTuple):
    """How far the thinking of a stream has come."""

    has_begun: bool
    is_over: bool = False
    num_tokens: int = 0
    last: tuple[int, ...] = ()  # the newest tokens outside thinking


class ThinkingConstraint:
    """A `structured.Constraint` over `inner`, if there is one, after `thought`."""

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
        # Within a character that is not complete a grammar may not allow it yet.
        index, bit = divmod(self._bound.end, 8)
        return bool(allowed[index] >> bit & 1)

    def _outside(self, thought: Thought, token_id: int) -> Thought:
        before = self._bound.before
        if token_id == self._bound.begin and thought.last == before:
            return thought._replace(has_begun=True)
        last = (*thought.last, token_id)[-len(before) :] if before else ()
        return thought._replace(last=last)
