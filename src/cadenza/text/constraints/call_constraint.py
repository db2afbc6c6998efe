"""`CallConstraint`: any text, in which each call that begins is one of a grammar. Invariants: what
it allows is a function of the accepted tokens; a token outside a call is sampled as without it;
where a call cannot be followed, the text goes on unconstrained, or, where calls must be of the
grammar, fails."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cadenza.structured import CallRule, Constraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_BEGIN_CHARS = 512
"""Of a call's beginning; of so many last characters it is known whether one is in them."""


class CallWatch:
    """Finds the beginnings of calls (`rule`) in the text of a stream's tokens, of which `text` is
    the end; `thinking` None: it is not decided whether the text begins with reasoning."""

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
        """The text of a call so far, as tokens, whose beginning this token completes; None if it
        completes none."""
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
    """A `structured.Constraint`. `watch` None: nothing is constrained any more. `call`: of a call,
    and nothing accepted; None: no call can be followed, as in a fork for drafts outside a call,
    which may not go on into one. `is_fork`: it is one in a call, of which `call` has accepted the
    beginning."""

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
        """Never: after a call there may be text."""
        return False

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
