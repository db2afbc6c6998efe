"""Random walks through random expressions and grammars: each that ends is matched independently."""

import random
import re
from collections.abc import Callable

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.structured import ConstraintSpec, StructuredOutput
from cadenza.text.constraints.token_constraint import ConstraintCompiler, GrammarConstraint
from cadenza.text.schemas.grammar import ADVICE, check_grammar, grammar_of
from cadenza.text.tokens.tokenizer import Tokenizer
from tests.text.random_expressions import random_expression
from tests.text.random_grammars import (
    Either,
    Literal,
    OneOf,
    Repeat,
    Rule,
    Sequence,
    as_gbnf,
    as_lark,
    is_derived,
    random_grammar,
)
from tests.text.walks import walk

EOS = 0
VOCAB_SIZE = 2560

Matches = Callable[[str], object]
MakeForm = Callable[[random.Random], tuple[StructuredOutput, Matches]]


def expression(rng: random.Random) -> tuple[StructuredOutput, Matches]:
    pattern = random_expression(rng)
    return StructuredOutput(regex=pattern), re.compile(pattern).fullmatch


def lark(rng: random.Random) -> tuple[StructuredOutput, Matches]:
    grammar = random_grammar(rng)
    return StructuredOutput(grammar=as_lark(grammar)), lambda text: is_derived(grammar, text)


def gbnf(rng: random.Random) -> tuple[StructuredOutput, Matches]:
    grammar = random_grammar(rng)
    return StructuredOutput(grammar=as_gbnf(grammar)), lambda text: is_derived(grammar, text)


class Walker:
    """Compiles forms over the bundled model's tokens, and walks through them."""

    def __init__(self) -> None:
        source = open_checkpoint(None).tokenizer_source
        assert source is not None
        self.tokenizer = Tokenizer(source)
        self.compiler = ConstraintCompiler(source, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])

    def check(self, make: MakeForm, seeds: range) -> int:
        """Walks through a form of each seed; how many ended."""
        num_complete = 0
        for seed in seeds:
            rng = random.Random(seed)
            form, matches = make(rng)
            grammar = grammar_of(form)
            problem = check_grammar(grammar)
            if problem is not None:  # as ambiguous as a rule that is one of its own parts
                assert problem.endswith(ADVICE), f"seed {seed}: {problem}: {form}"
                continue
            constraint = self.compiler.compile(ConstraintSpec(grammar=grammar)).result(30)
            assert isinstance(constraint, GrammarConstraint)
            walked = walk(constraint, vocab_size=VOCAB_SIZE, eos=EOS, rng=rng, max_tokens=40)
            if walked.is_complete:
                num_complete += 1
                text = self.tokenizer.decode(walked.token_ids, skip_special_tokens=False)
                assert matches(text), f"seed {seed}: {text!r} for {form}"
        return num_complete


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


@pytest.mark.parametrize("make", [expression, lark, gbnf], ids=lambda make: make.__name__)
def test_walks_through_random_forms_are_matched(walker: Walker, make: MakeForm):
    assert walker.check(make, range(40)) >= 20


@pytest.mark.soak
@pytest.mark.parametrize("make", [expression, lark, gbnf], ids=lambda make: make.__name__)
def test_walks_through_thousands_of_random_forms_are_matched(walker: Walker, make: MakeForm):
    assert walker.check(make, range(100, 3100)) >= 1500


def test_a_walk_through_another_form_is_not_matched(walker: Walker):
    """The control: forms that are not those of the seed are found."""

    def other(rng: random.Random) -> tuple[StructuredOutput, Matches]:
        form, _ = expression(rng)
        return form, expression(rng)[1]

    with pytest.raises(AssertionError, match="seed"):
        walker.check(other, range(10))


def test_the_recogniser_takes_what_is_derived_and_nothing_else():
    balanced = Sequence((Literal("("), Repeat(Rule("r0"), "*"), Literal(")")))
    nested = {"r0": balanced}
    assert all(is_derived(nested, text) for text in ("()", "(())", "(()())"))
    assert not any(is_derived(nested, text) for text in ("", "(", "())", "()()"))
    left = {"r0": Either((Sequence((Rule("r0"), Literal("+"), OneOf("0-9"))), OneOf("0-9")))}
    assert all(is_derived(left, text) for text in ("1", "1+2", "1+2+3"))
    assert not any(is_derived(left, text) for text in ("", "+", "1+", "a"))
    few = {"r0": Sequence((Repeat(OneOf("a-c"), "?"), Repeat(Literal("x"), "+")))}
    assert all(is_derived(few, text) for text in ("x", "axx", "cx"))
    assert not any(is_derived(few, text) for text in ("a", "abx", "dx"))
