"""Constraints over the bundled model's tokens: every walk that ends is what was asked for."""

import json
import random
import re
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.drafting.drafts import Lookahead
from cadenza.structured import CallRule, ConstraintSpec, StructuredOutput, ThinkingBound
from cadenza.text.constraints.call_constraint import ThinkingConstraint
from cadenza.text.constraints.token_constraint import (
    CompileThreads,
    ConstraintCompiler,
    GrammarConstraint,
)
from cadenza.text.schemas.grammar import check_grammar, grammar_of
from cadenza.text.tokens.tokenizer import Tokenizer
from tests.text.schemas import random_schema
from tests.text.walks import Judge, allowed_ids, walk

EOS = 0
VOCAB_SIZE = 2560
REGEXES = (r"\d{3}-[a-z]+", "^(yes|no)$", "a?b+c*", "[^x]{1,5}", "(?i)ok!", r"[αβγ]{2}", ".*end")
GBNF = 'root ::= "a" [0-9]+ ws\nws ::= [ \\t]*'


def constraint_of(compiler: ConstraintCompiler, grammar: str) -> GrammarConstraint:
    """With a fork, as soon as one is asked for."""
    found = compiler.compile(ConstraintSpec(grammar=grammar)).result(30)
    assert isinstance(found, GrammarConstraint)
    found.fork()
    assert found._another is not None
    found._another.result(30)
    return found


def check_schemas(judge: Judge, seeds: range) -> int:
    """Walks through random schemas; how many ended."""
    num_complete = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = grammar_of(StructuredOutput(json=schema))
        if check_grammar(grammar) is not None:
            continue
        walked = walk(
            constraint_of(judge.compiler, grammar), vocab_size=VOCAB_SIZE, eos=EOS, rng=rng
        )
        if walked.is_complete:
            num_complete += 1
            text = judge.text(walked)
            found = json.loads(text, parse_float=_finite)
            checker = jsonschema_rs.validator_for(schema, validate_formats=True)
            assert checker.is_valid(found), f"seed {seed}: {text!r} for {schema}"
    return num_complete


def _finite(text: str) -> float:
    """A number of any size, which the validator cannot hold."""
    return max(-1e308, min(1e308, float(text)))


def test_walks_through_random_schemas_validate(judge: Judge):
    assert check_schemas(judge, range(150)) >= 60


@pytest.mark.soak
def test_walks_through_ten_thousand_schemas_validate(judge: Judge):
    assert check_schemas(judge, range(1000, 11_000)) >= 4000


@pytest.mark.parametrize("regex", REGEXES)
def test_walks_through_expressions_match_them(judge: Judge, regex: str):
    grammar = grammar_of(StructuredOutput(regex=regex))
    num_complete = 0
    for seed in range(8):
        constraint, rng = constraint_of(judge.compiler, grammar), random.Random(seed)
        walked = walk(constraint, vocab_size=VOCAB_SIZE, eos=EOS, rng=rng)
        text = judge.text(walked)
        if walked.is_complete:
            num_complete += 1
            assert re.fullmatch(regex, text), text
    assert num_complete or regex == ".*end"


def test_choices_and_grammars_are_followed(judge: Judge):
    choices = ["yes", "no", 'may"be', "née\n", "12"]
    wanted = [
        (StructuredOutput(choice=choices), "|".join(map(re.escape, choices))),
        (StructuredOutput(grammar=GBNF), "a[0-9]+[ \t]*"),
        (StructuredOutput(grammar='start: "<" /[a-z]+/ ">"'), "<[a-z]+>"),
    ]
    for structured, regex in wanted:
        for seed in range(6):
            constraint = constraint_of(judge.compiler, grammar_of(structured))
            walked = walk(constraint, vocab_size=VOCAB_SIZE, eos=EOS, rng=random.Random(seed))
            text = judge.text(walked)
            assert re.fullmatch(regex, text) or not walked.is_complete, text


PREFIXES = (
    "a",
    "ab",
    "a b",
    "a  b",
    "abc",
    'a"',
    "a\n",
    "é",
    "éa",
    "a|b",
    "(a",
    "[a]",
    "\\n",
    "^a$",
)


def test_choices_that_begin_alike_are_each_allowed_and_nothing_else_is(judge: Judge):
    grammar = grammar_of(StructuredOutput(choice=PREFIXES))
    for text in PREFIXES:
        assert judge.allows(text, grammar), text
    for text in ("b", "a ", "abcd", "A", "a.b", "\n", "n", "[a", "aa", " a"):
        assert not judge.allows(text, grammar), text


def test_as_many_choices_as_are_allowed_are_followed(judge: Judge):
    grammar = grammar_of(StructuredOutput(choice=[f"no. {i}" for i in range(4096)]))
    assert judge.allows("no. 4095", grammar)
    assert not judge.allows("no. 4096", grammar)


@pytest.mark.parametrize(
    ("kind", "text", "is_one"),
    [
        ("time", "23:59:59Z", True),
        ("time", "12:30:60Z", False),
        ("date-time", "2024-02-29T12:30:05.5+01:00", True),
        ("date-time", "2024-02-29T12:30:60Z", False),
        ("date-time", "2023-02-29T12:30:05Z", False),
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "1900-02-29", False),
        ("date", "2023-02-29", False),
        ("date", "2023-02-28", True),
        ("date", "2023-12-31", True),
    ],
)
def test_a_format_allows_no_text_that_a_validator_refuses(
    judge: Judge, kind: str, text: str, is_one: bool
):
    for more in ({}, {"pattern": "[0-9]"}):
        schema = {"type": "string", "format": kind, **more}
        grammar = grammar_of(StructuredOutput(json=schema))
        assert check_grammar(grammar) is None
        assert judge.allows(json.dumps(text), grammar) == is_one
        checker = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert checker.is_valid(text) == is_one


def test_a_constraint_is_a_function_of_the_tokens_that_it_accepted(compiler: ConstraintCompiler):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar = grammar_of(StructuredOutput(json=schema))
    rng = random.Random(5)
    first, masks, token_ids = constraint_of(compiler, grammar), [], []
    for _ in range(20):
        masks.append(first.allowed())
        token_ids.append(rng.choice(allowed_ids(first, VOCAB_SIZE)))
        first.accept(token_ids[-1])
    other = constraint_of(compiler, grammar)
    for place in (0, 7, 13):
        rebuilt = constraint_of(compiler, grammar)
        for token_id in token_ids[:place]:
            rebuilt.accept(token_id)
        assert rebuilt.allowed() == masks[place]
    assert other.allowed() == masks[0]


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_fork_goes_on_alone_from_where_it_was_made(
    compiler: ConstraintCompiler, *, is_thinking: bool
):
    grammar = grammar_of(StructuredOutput(regex="[a-z0-9]{4,30}!?"))
    bound = ThinkingBound(begin=None, end=0, max_tokens=6)
    first = constraint_of(compiler, grammar)
    if is_thinking:
        first = ThinkingConstraint(bound, VOCAB_SIZE, None)
    rng = random.Random(3)
    masks, token_ids = [], []
    for _ in range(8):
        masks.append(first.allowed())
        token_ids.append(rng.choice(allowed_ids(first, VOCAB_SIZE)))
        fork = first.fork()
        assert fork is not None
        fork.accept(token_ids[-1])
        for _ in range(3):
            if not fork.is_complete:
                fork.accept(rng.choice(allowed_ids(fork, VOCAB_SIZE)))
        assert first.allowed() == masks[-1]
        first.accept(token_ids[-1])
        fork = first.fork()
        assert fork is not None
        assert fork.allowed() == first.allowed()
    assert len(set(masks)) > 1
    assert not first.has_failed


LIMITED = grammar_of(StructuredOutput(regex=r"(\w+\s?){1,1000}"))
"""Each word needs more states of the lexer, up to the limit."""


def words(constraint: GrammarConstraint, num_rejected: int = 0) -> list[int]:
    """What a stream takes until its limit; before each token, drafts are tried and rejected."""
    rng, taken = random.Random(7), list[int]()
    while True:
        constraint.allowed()
        if constraint.has_failed or len(taken) == 400:
            return taken
        allowed = allowed_ids(constraint, VOCAB_SIZE)
        ahead = Lookahead(constraint)
        ahead.take_all(rng.choices(allowed, k=16)[:num_rejected])
        taken.append(rng.choice(allowed))
        constraint.accept(taken[-1])


def test_a_stream_reaches_a_limit_at_the_same_token_whatever_others_and_drafts_do(
    compiler: ConstraintCompiler,
):
    alone = words(constraint_of(compiler, LIMITED))
    assert 0 < len(alone) < 400, "the form must reach a limit"
    assert words(constraint_of(compiler, LIMITED)) == alone
    assert words(constraint_of(compiler, LIMITED), num_rejected=4) == alone


def test_copies_of_a_matcher_would_reach_a_limit_together(compiler: ConstraintCompiler):
    """Why each sample of a request has its grammar compiled: a copy shares the states of the lexer
    that count. Once this fails, the samples of a request can be copies of one matcher."""
    alone = words(constraint_of(compiler, LIMITED))
    one, other = (
        GrammarConstraint(matcher.deep_copy(), Future)
        for matcher in [constraint_of(compiler, LIMITED)._matcher] * 2
    )
    assert words(one) == alone
    assert words(other) != alone


def test_the_samples_of_a_request_leave_a_thread_to_other_requests(compiler: ConstraintCompiler):
    threads = CompileThreads()
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    several = ConstraintCompiler(
        source, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], threads=threads
    )
    mine, others = (grammar_of(StructuredOutput(regex=each)) for each in ("a{9}", "b{9}c{9}"))
    has_begun, may_go = Event(), Event()

    def hold() -> bool:
        has_begun.set()
        return may_go.wait(60)

    threads.submit(0, hold, mine)  # as a slow grammar would
    assert has_begun.wait(60)
    samples = [several.compile(ConstraintSpec(grammar=mine)) for _ in range(3)]
    rule = CallRule(begin="<", grammar=mine)
    samples += [several.compile(ConstraintSpec(calls=rule)) for _ in range(2)]
    assert several.compile(ConstraintSpec(grammar=others)).result(60) is not None
    assert not any(each.done() for each in samples)
    may_go.set()
    found = [each.result(60) for each in samples]
    assert None not in found
    assert len({id(each) for each in found}) == len(found), "each has its own"
    several.close()


def test_drafts_are_cut_at_the_first_token_that_a_grammar_does_not_allow(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
):
    constraint = constraint_of(compiler, grammar_of(StructuredOutput(regex="[0-9]{3}")))
    digits, letter = tokenizer.encode("1 2 3 4")[::2], tokenizer.encode("x")[-1]
    assert all(token_id in allowed_ids(constraint, VOCAB_SIZE) for token_id in digits[:1])
    ahead = Lookahead(constraint)
    assert ahead.take_all([digits[0], digits[0], letter, digits[0]]) == 2
    assert len(ahead.masks) == 3
    assert not constraint.has_failed
    ahead = Lookahead(constraint)
    assert ahead.take_all([digits[0]] * 5) == 3
    assert ahead.is_over
    assert not constraint.is_complete


@dataclass(slots=True, eq=False)
class Counted:
    """A matcher that counts how often it tokenises what must follow."""

    inner: LLMatcher
    num_calls: int = 0

    def compute_bitmask(self) -> bytes:
        self.num_calls += 1
        return self.inner.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        self.num_calls += 1
        return self.inner.compute_ff_tokens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    "form",
    [{"choice": ["a b c " * 500 + "x", "a b c " * 500 + "y"]}, {"json": {"const": "d e " * 700}}],
    ids=lambda form: next(iter(form)),
)
def test_a_long_text_that_must_follow_is_tokenised_once(
    compiler: ConstraintCompiler, form: dict[str, Any]
):
    grammar = grammar_of(StructuredOutput(**form))
    matcher = Counted(constraint_of(compiler, grammar)._matcher)
    constraint, rng = GrammarConstraint(cast(LLMatcher, matcher), Future), random.Random(1)
    walked = walk(constraint, vocab_size=VOCAB_SIZE, eos=EOS, rng=rng, max_tokens=4000)
    assert walked.is_complete
    assert len(walked.token_ids) > 500
    assert matcher.num_calls < 20


@given(
    text=st.text(alphabet="'stmd .🎉\n", min_size=2, max_size=40),
    seed=st.integers(min_value=0, max_value=1000),
)
@example(text="🎉'se🎉'ma🎉'd", seed=1)
@settings(deadline=None)
def test_drafts_behind_a_part_of_a_text_that_must_follow_have_the_masks_of_the_stream(
    compiler: ConstraintCompiler, text: str, seed: int
):
    """Its rest, by itself, may be other tokens: half an emoji in front of it is no text."""
    grammar = grammar_of(StructuredOutput(choice=[text, text + "x"]))
    alone, drafting = (constraint_of(compiler, grammar) for _ in range(2))
    rng, masks = random.Random(seed), [alone.allowed()]
    while not alone.is_complete and EOS not in (ids := allowed_ids(alone, VOCAB_SIZE)):
        alone.accept(rng.choice(ids))
        masks.append(alone.allowed())
    taken = [*alone._token_ids]
    for place, token_id in enumerate(taken):
        ahead = Lookahead(drafting)
        count = ahead.take_all(taken[place : place + rng.randrange(4)])
        assert ahead.masks == masks[place : place + count + 1]
        drafting.accept(token_id)


def test_there_are_no_drafts_while_the_matcher_for_them_is_compiled(compiler: ConstraintCompiler):
    """A grammar may take seconds to compile, for which no step waits."""
    grammar, coming = grammar_of(StructuredOutput(regex="[0-9]{3}")), Future[LLMatcher]()
    first, second = (constraint_of(compiler, grammar)._matcher for _ in range(2))
    inner = GrammarConstraint(first, lambda: coming)
    bound = ThinkingBound(begin=None, end=0, max_tokens=600)
    for constraint in (inner, ThinkingConstraint(bound, VOCAB_SIZE, inner)):
        allowed = allowed_ids(constraint, VOCAB_SIZE)
        assert constraint.fork() is None
        assert Lookahead(constraint).take_all(allowed[:1]) == 0
    coming.set_result(second)
    for constraint in (inner, ThinkingConstraint(bound, VOCAB_SIZE, inner)):
        assert Lookahead(constraint).take_all(allowed[:1]) == 1


def test_a_token_that_is_not_allowed_fails_its_constraint_only(compiler: ConstraintCompiler):
    grammar = grammar_of(StructuredOutput(regex="[0-9]{3}"))
    first, second = constraint_of(compiler, grammar), constraint_of(compiler, grammar)
    odd = next(i for i in range(1, VOCAB_SIZE) if i not in allowed_ids(first, VOCAB_SIZE))
    first.accept(odd)
    assert (first.has_failed, first.is_complete, second.has_failed) == (True, False, False)


def test_a_grammar_that_cannot_be_compiled_is_none(compiler: ConstraintCompiler):
    assert compiler.compile(ConstraintSpec(grammar="no grammar")).result(30) is None


def test_the_mask_covers_a_vocabulary_larger_than_the_tokenizers():
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    padded = ConstraintCompiler(source, vocab_size=VOCAB_SIZE + 77, eos_token_ids=[EOS])
    constraint = constraint_of(padded, grammar_of(StructuredOutput(regex="[^a]")))
    assert len(constraint.allowed()) * 8 >= VOCAB_SIZE + 77
    assert max(allowed_ids(constraint, VOCAB_SIZE + 77)) < VOCAB_SIZE
