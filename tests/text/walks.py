"""Whether texts may be answers of a form, and random walks through a constraint: any allowed token,
each as likely as the others."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.structured import Constraint, ConstraintSpec
from cadenza.text import Tokenizer
from cadenza.text.constraints.token_constraint import ConstraintCompiler, GrammarConstraint


@dataclass(frozen=True, slots=True)
class Walk:
    """The tokens of a walk; incomplete if it was cut at its length."""

    token_ids: tuple[int, ...]
    is_complete: bool


def allowed_ids(constraint: Constraint, vocab_size: int) -> list[int]:
    bits = int.from_bytes(constraint.allowed(), "little")
    return [token_id for token_id in range(vocab_size) if bits >> token_id & 1]


def accepts(
    constraint: GrammarConstraint, token_ids: Sequence[int], *, vocab_size: int, eos: int
) -> bool:
    """Whether tokens may be the whole answer, each of them and their end."""
    for token_id in token_ids:
        if token_id not in allowed_ids(constraint, vocab_size):
            return False
        constraint.accept(token_id)
    return constraint.is_complete or eos in allowed_ids(constraint, vocab_size)


def walk(
    constraint: GrammarConstraint,
    *,
    vocab_size: int,
    eos: int,
    rng: random.Random,
    max_tokens: int = 60,
) -> Walk:
    """Prefers to end where it may, in one step of four, so that walks end."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        allowed = allowed_ids(constraint, vocab_size)
        assert allowed, f"no token may follow {token_ids}"
        token_id = rng.choice(allowed)
        if eos in allowed and rng.random() < 0.25:
            token_id = eos
        if token_id == eos:
            return Walk(tuple(token_ids), True)
        constraint.accept(token_id)
        assert not constraint.has_failed
        token_ids.append(token_id)
        if constraint.is_complete:
            return Walk(tuple(token_ids), True)
    return Walk(tuple(token_ids), False)


@dataclass(frozen=True)
class Judge:
    """Forms over the bundled model's tokens."""

    tokenizer: Tokenizer
    compiler: ConstraintCompiler

    def constraint(self, grammar: str) -> GrammarConstraint:
        found = self.compiler.compile(ConstraintSpec(grammar=grammar)).result(60)
        assert isinstance(found, GrammarConstraint)
        return found

    def allows(self, text: str, grammar: str) -> bool:
        """Whether a text may be the whole answer, token by token."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return accepts(self.constraint(grammar), token_ids, vocab_size=2560, eos=0)

    def text(self, walked: Walk) -> str:
        return self.tokenizer.decode(walked.token_ids, skip_special_tokens=False)
