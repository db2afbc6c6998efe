"""A constraint without text: what it allows is a hash of its name and of the tokens it accepted.

An error in when it is asked, in what it accepted or in whose mask a row has changes the stream of
the token-storing runner, which hashes a row's mask.
"""

import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from cadenza.batch.prompt import Prompt
from cadenza.batch.sequence import Sequence
from cadenza.batch.token_rules import RuleLayout
from cadenza.request import Request
from cadenza.sparse_prefill import KeptTokens
from cadenza.structured import Constraint, ConstraintSpec

NEVER = "never"
"""The grammar that cannot be compiled."""

SHORT = "short"
"""The grammar that is complete after a token in 8."""

STEADY = "b"
"""The grammar whose mask stays for four tokens, or fewer."""

PHRASES = "phrases"
"""The grammar in which up to 21 tokens are forced behind each that is not."""

FAILS_AFTER = "fails after "
"""Followed by the number of tokens that it accepts."""


@dataclass(slots=True)
class HashedConstraint:
    """Complete after a token in 64, or in 8; allows seven tokens in 8."""

    grammar: str
    accepted: list[int] = field(default_factory=list[int])

    @property
    def is_complete(self) -> bool:
        first = self._digest(len(self.accepted))[0]
        return bool(self.accepted) and first < (32 if self.grammar == SHORT else 4)

    @property
    def has_failed(self) -> bool:
        name = self.grammar
        return name.startswith(FAILS_AFTER) and len(self.accepted) > int(name[len(FAILS_AFTER) :])

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def allowed(self) -> bytes:
        forced = self.forced()
        if forced:
            return (1 << forced[0]).to_bytes(16, "little")
        count = len(self.accepted)
        digest = self._digest(count // 4 * 4 if self.grammar == STEADY else count)
        parts = (digest[start : start + 16] for start in (16, 32, 48))
        return bytes(first | second | third for first, second, third in zip(*parts, strict=True))

    def forced(self) -> SequenceOf[int]:
        if self.grammar != PHRASES:
            return ()
        start, count = 0, len(self.accepted)
        while start < count:
            digest = self._digest(start + 1)
            forced = [each % 50 for each in digest[1 : 1 + digest[0] % 22]]
            start += 1 + len(forced)
        return forced[len(forced) - (start - count) :] if start > count else ()

    def fork(self) -> "HashedConstraint":
        return HashedConstraint(self.grammar, [*self.accepted])

    def _digest(self, count: int) -> bytes:
        """Of the first `count` tokens."""
        text = f"{self.grammar} {self.accepted[:count]}"
        return hashlib.blake2b(text.encode(), digest_size=64).digest()


@dataclass(slots=True, eq=False)
class Compiled:
    """Done after it has been asked a few times."""

    constraint: Constraint | None
    num_asked: int = 0
    is_cancelled: bool = False

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True

    def done(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 3

    def result(self, timeout: float | None = None) -> Constraint | None:
        if timeout is not None and not self.done():
            raise TimeoutError
        return self.constraint


def constraint_of(request: Request) -> HashedConstraint | None:
    spec = request.constraint
    return None if spec is None else HashedConstraint(spec.grammar)


def record_of(request: Request, vocab_size: int, kept: KeptTokens) -> list[int]:
    """What the fake model hears of a request's token rules."""
    sequence = Sequence(
        request_id=0,
        request=request,
        seed=0,
        max_num_tokens=0,
        stop_token_ids=frozenset(),
        token_ids=list(request.prompt_token_ids),
        prompt=Prompt(kept=kept),
        constraint=constraint_of(request),
    )
    record = RuleLayout(vocab_size).encode(sequence)
    return [] if record is None else record.tolist()


def compile_hashed(spec: ConstraintSpec) -> Compiled:
    return Compiled(None if spec.grammar == NEVER else HashedConstraint(spec.grammar))
