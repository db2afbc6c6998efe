"""The JSON Schema Test Suite (draft 2020-12) as the measure of what a constraint allows.

A schema is followed exactly or refused by name: no invalid instance may be an answer, and valid
ones may be, in the order of their schema's properties. `make real` fetches the suite.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.structured import ConstraintSpec, StructuredOutput
from cadenza.text.constraints.token_constraint import ConstraintCompiler, GrammarConstraint
from cadenza.text.schemas.grammar import check_grammar, grammar_of
from cadenza.text.tokens.tokenizer import Tokenizer
from tests.text.walks import accepts
from tools import schema_suite

pytestmark = pytest.mark.oracle

EOS, VOCAB_SIZE = 0, 2560

NARROWER = frozenset(
    "additionalProperties allOf anyOf const email enum format ipv6 properties type "
    "unevaluatedProperties vocabulary".split()
)
"""Files with valid instances that are no answers: numbers such as 1.0 for 1, properties in another
order than a constant's or an `allOf`'s, members beside `properties` that nothing asks for,
addresses in rare notations, and texts that a format refuses, which is no more than an annotation
there."""

ANNOTATIONS = frozenset(
    "idn-email idn-hostname iri iri-reference json-pointer regex relative-json-pointer "
    "uri-reference uri-template".split()
)
"""Files of formats that are annotations, so that any text is an answer."""

LEAP_SECONDS = frozenset({"date-time", "time"})

CONDITIONS = ("if", "then", "else")
REFUSED = {
    **{name: (name,) for name in ("not", "uniqueItems", "dependentSchemas", "dependentRequired")},
    **{name: ("contains", name) for name in ("contains", "minContains", "maxContains")},
    "if-then-else": CONDITIONS,
    "unevaluatedItems": ("unevaluatedItems", *CONDITIONS),
    "unevaluatedProperties": (
        *("unevaluatedProperties", "oneOf", "not", "dependentSchemas"),
        *CONDITIONS,
    ),
}
"""Files of keywords that cannot be enforced: a refusal names at least one of these."""


@pytest.fixture(scope="module")
def suite() -> Path:
    found = schema_suite.find(schema_suite.cache_folder(os.environ))
    if found is None:
        pytest.skip("the suite is not here; run `make real`")
    return found / "draft2020-12"


class Judge:
    """Whether instances may be answers, token by token, on the bundled model's tokens."""

    def __init__(self) -> None:
        source = open_checkpoint(None).tokenizer_source
        assert source is not None
        self.tokenizer = Tokenizer(source)
        self.compiler = ConstraintCompiler(source, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])

    def allows(self, grammar: str, instance: Any) -> bool:
        constraint = self.compiler.compile(ConstraintSpec(grammar=grammar)).result(30)
        assert isinstance(constraint, GrammarConstraint)
        text = json.dumps(instance, ensure_ascii=False)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return accepts(constraint, token_ids, vocab_size=VOCAB_SIZE, eos=EOS)


def grammar_or_problem(schema: Any) -> tuple[str, str | None]:
    try:
        grammar = grammar_of(StructuredOutput(json=schema, strict=True))
    except InvalidRequestError as error:
        return "", str(error)
    return grammar, check_grammar(grammar)


def groups(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        for group in json.loads(file.read_bytes()):
            yield file.stem, group


def ordered(schema: Any, instance: Any) -> Any:
    """The instance with its members in the order of the schema's properties."""
    if isinstance(instance, dict):
        known = schema.get("properties", {}) if isinstance(schema, dict) else {}
        names = [*(name for name in known if name in instance)]
        names += [name for name in instance if name not in known]
        return {name: ordered(known.get(name, {}), instance[name]) for name in names}
    if isinstance(instance, list):
        inner = schema.get("items", {}) if isinstance(schema, dict) else {}
        return [ordered(inner, each) for each in instance]
    return instance


def test_no_invalid_instance_is_an_answer_and_valid_ones_are(suite: Path):
    judge, counts = Judge(), Counter[str]()
    wrong: list[str] = []
    for name, group in groups(suite):
        grammar, problem = grammar_or_problem(group["schema"])
        if problem is not None:
            counts["refused"] += 1
            continue
        for case in group["tests"]:
            is_allowed = judge.allows(grammar, ordered(group["schema"], case["data"]))
            counts[f"valid {case['valid']} allowed {is_allowed}"] += 1
            is_narrower = name in NARROWER or (name in LEAP_SECONDS and "leap" in str(case))
            if name in ANNOTATIONS and is_allowed:
                continue
            if is_allowed != case["valid"] and not (case["valid"] and is_narrower):
                wrong.append(f"{name}: {group['description']}: {case['description']}")
    assert wrong == []
    assert counts["valid True allowed True"] > 450
    assert counts["valid False allowed False"] > 350
    assert counts["valid True allowed False"] < 50
    assert counts["refused"] < 220


def test_a_keyword_that_cannot_be_enforced_is_named(suite: Path):
    seen = Counter[str]()
    for name, group in groups(suite):
        _, problem = grammar_or_problem(group["schema"])
        if name in REFUSED and problem is not None:
            seen[name] += 1
            assert any(f" {word}" in problem for word in REFUSED[name]), (name, problem)
    assert seen.keys() == REFUSED.keys()


def test_a_judge_of_another_schema_is_caught(suite: Path):
    """The control: each group's instances, judged by the schema of the group before it."""
    judge, before, num_wrong = Judge(), "", 0
    for _, group in list(groups(suite))[:60]:
        grammar, problem = grammar_or_problem(group["schema"])
        for case in group["tests"] if before else ():
            allowed = judge.allows(before, ordered(group["schema"], case["data"]))
            num_wrong += allowed and not case["valid"]
        before = grammar if problem is None else before
    assert num_wrong > 10
