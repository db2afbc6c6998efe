"""Which fields of a request rule tokens out of its next position."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from cadenza.batch.sequence import Sequence
from cadenza.batch.token_rules import ruling_fields
from cadenza.request import Request, SamplingParams
from cadenza.structured import Constraint, ConstraintSpec, ThinkingBound

PROMPT = (1, 2, 3)
BOUND = ThinkingBound(begin=None, end=9, max_tokens=4)


@dataclass(slots=True, eq=False)
class Masked:
    """A constraint with this mask."""

    mask: bytes
    is_complete: bool = False
    has_failed: bool = False

    def accept(self, token_id: int) -> None:
        raise AssertionError(f"nothing is sampled, but {token_id} was accepted")

    def allowed(self) -> bytes:
        return self.mask

    def forced(self) -> list[int]:
        return []

    def fork(self) -> Constraint | None:
        return None


def fields_of(
    generated: tuple[int, ...],
    *,
    words: tuple[tuple[int, ...], ...] = (),
    spec: ConstraintSpec | None = None,
    mask: bytes = b"\x01",
    **params: Any,
) -> tuple[str, ...]:
    request = Request(
        prompt_token_ids=PROMPT,
        params=SamplingParams(**params),
        bad_word_token_ids=words,
        constraint=spec,
    )
    sequence = Sequence(
        request_id=0,
        request=request,
        sample=0,
        seed=0,
        max_num_tokens=20,
        stop_token_ids=frozenset(request.params.stop_token_ids),
        arrived_s=0.0,
        token_ids=[*PROMPT, *generated],
    )
    sequence.constraint = None if spec is None else Masked(mask)
    return ruling_fields(sequence)


def test_biases_penalties_and_filters_rule_out_no_token() -> None:
    shaped = {"logit_bias": {1: -100.0}, "presence_penalty": 2.0, "top_k": 1, "min_p": 1.0}
    assert fields_of((), **shaped) == ()


def test_allowed_tokens_always_rule() -> None:
    assert fields_of((4,), allowed_token_ids=(5,)) == ("allowed_token_ids",)


@pytest.mark.parametrize(
    ("words", "generated", "rules"),
    [
        (((7,),), (), True),
        (((7, 8),), (), False),
        (((7, 8),), (7,), True),
        (((7, 8),), (7, 8), False),
        (((7, 8, 9),), (8,), False),
        (((3, 8),), (), False),  # 3 is the prompt's last token
        (((7, 8), (5, 6)), (4, 5), True),
    ],
)
def test_a_bad_word_rules_where_only_its_last_token_is_missing(
    words: tuple[tuple[int, ...], ...], generated: tuple[int, ...], rules: bool
) -> None:
    assert fields_of(generated, words=words) == (("bad_words",) if rules else ())


def test_min_tokens_rule_until_there_are_so_many_where_something_could_end_the_stream() -> None:
    assert fields_of((4,), min_tokens=2, stop_token_ids=(6,)) == ("min_tokens",)
    assert fields_of((4, 4), min_tokens=2, stop_token_ids=(6,)) == ()
    assert fields_of((4,), min_tokens=2) == ()


def test_a_constraint_rules_by_what_was_asked_for_unless_it_allows_every_token() -> None:
    form, thinking = ConstraintSpec(grammar="a"), ConstraintSpec(thinking=BOUND)
    assert fields_of((), spec=form) == ("structured",)
    assert fields_of((), spec=thinking) == ("thinking_token_budget",)
    both = replace(form, thinking=BOUND)
    assert fields_of((), spec=both) == ("structured", "thinking_token_budget")
    assert fields_of((), spec=thinking, mask=b"\xff\xff") == ()


def test_all_that_rule_are_named_in_one_order() -> None:
    found = fields_of(
        (),
        words=((7,),),
        spec=ConstraintSpec(grammar="a"),
        allowed_token_ids=(5,),
        min_tokens=1,
        stop_token_ids=(5,),
    )
    assert found == ("allowed_token_ids", "bad_words", "min_tokens", "structured")
