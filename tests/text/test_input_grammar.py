"""Grammars of custom tools' texts hold for the texts as they are written within JSON."""

import json
import random
import re
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer

from cadenza.errors import InvalidRequestError
from cadenza.text.answers.input_grammar import Escapes, InputGrammar
from cadenza.text.schemas.grammar import check_grammar

TOKENS = LLTokenizer("byte")
PLAIN, TAGGED = Escapes(), Escapes(also="<")

EDIT = """start: begin hunk+ end
begin: "*** Start Edit" LF
end: "*** Stop Edit" LF?

hunk: add | drop | change
add: "*** New: " name LF lines_added+
drop: "*** Drop: " name LF
change: "*** Change: " name LF move? lines?
move: "*** To: " name LF

lines_added: "+" /(.*)/ LF -> line
lines: (at | line)+ eof?
at: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** Last" LF   // behind the last line
name: /(.+)/

%import common.LF
"""
"""Of the shape that coding agents send: lines of a patch."""

PATCH = (
    '*** Start Edit\n*** New: a "b".py\n+x = "\\n"\té😀 <b></parameter>\n'
    "*** Change: q\n@@ def f\n-a\n+\n*** Stop Edit\n"
)


def is_allowed(grammar: InputGrammar, text: str, escapes: Escapes = PLAIN) -> bool:
    compiled = grammar.written(check_grammar, escapes)
    assert check_grammar(compiled) is None
    content = f'"{escapes.text(text)}"'
    assert json.loads(content) == text
    return _accepted(compiled, [content])[0]


def lark(definition: str) -> InputGrammar:
    return InputGrammar(syntax="lark", definition=definition)


def regex(definition: str) -> InputGrammar:
    return InputGrammar(syntax="regex", definition=definition)


@pytest.mark.parametrize("escapes", [PLAIN, TAGGED])
def test_a_patch_grammar_allows_patches_alone(escapes: Escapes):
    assert is_allowed(lark(EDIT), PATCH, escapes)
    assert is_allowed(lark(EDIT), PATCH.removesuffix("\n"), escapes)
    for wrong in (PATCH[:-3], PATCH.replace("-a", "a"), PATCH.replace("@@ d", "@@d")):
        assert not is_allowed(lark(EDIT), wrong, escapes)


def test_a_text_of_tagged_notations_has_no_tag():
    assert "<" not in TAGGED.text(PATCH)


EXPRESSIONS = (
    r'^[^a-z"]+/\w\s?$',
    r"(?i)a\n\"B[x/\"\/]",
    r"[\s\S]{1,3}",
    r"\p{L}[\P{L}x]\W?",
    r"[^\p{Cc}<]+|\x{22}\u0041",
    r"(?s).a|.b",
    r"[\x00-\x{1f}]|[\[\]\\]{2}|[^\[]\|",
    r"(?:a|\\\n)*[|a]?$",
    "a\nb|<[<>]|</",
)
ALPHABET = 'aAbBx1/"\\\n\t<>[]|\x01\x1f \x7fé'


@pytest.mark.parametrize("pattern", EXPRESSIONS)
@pytest.mark.parametrize("escapes", [PLAIN, TAGGED])
def test_an_expression_allows_the_texts_that_it_matches(pattern: str, escapes: Escapes):
    rng = random.Random(7)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(4))) for _ in range(80)]
    texts += [
        'a\n"b/',
        'A\n"Bx',
        'A"/b',
        "A/b\n",
        '"A',
        "a\nb",
        "</",
        "<<",
        "\\\na|",
        "[]",
        "\na",
        '\n"b"',
    ]
    compiled = regex(pattern).written(check_grammar, escapes)
    raw = LLMatcher.grammar_from_lark(regex(pattern).lark)
    found = _accepted(compiled, [f'"{escapes.text(text)}"' for text in texts])
    assert found == _accepted(raw, texts)
    assert len(set(found)) == 2, "the texts show both"


def _accepted(grammar: str, texts: Sequence[str]) -> list[bool]:
    matcher = LLMatcher(TOKENS, grammar, log_level=0)
    found: list[bool] = []
    for text in texts:
        content = list(text.encode())
        taken = matcher.try_consume_tokens(content)
        found.append(taken == len(content) and matcher.is_accepting())
        matcher.reset()
    return found


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        ('start: A "!"\nA: ~/(?s).*"".*/ & /(?s).*/', ['a"b!', "\n!"], ['a""b!']),
        ('start: A~2..3 B\nA: " ".."#"\nB: "x\\""i // c "\n', ['" X"'], ['x"', '    x"']),
        ('start: A (B A)*\nA: /[a-z]+/\nB: ","\n%ignore /[ \\n]+/', ["a , b", "a\n,b"], ["a b"]),
        ('?start: e\n!e: t ("+" t)*\nt: /[0-9]+/ | "(" e ")" -> par', ["(1+(22))"], ["(1+2"]),
        (
            'start: "(" start? ")" | S\nS: ESCAPED_STRING\n%import common.ESCAPED_STRING',
            ['("a\\"b")', "()"],
            ['("a\n")', "("],
        ),
        (
            'start: [a] b\na: "a\n"\n  | "c"\nb.2: "b"?'.replace('\n"', '\\n"').replace(".2", ""),
            ["a\nb", "cb", ""],
            ["ab"],
        ),
        (
            "start: X WS Y\nX: C_COMMENT\nY: NEWLINE\n%import common (C_COMMENT, WS, NEWLINE)",
            ["/* a\n* */ \t\n\r\n"],
            ["/* */ */ \n\n", "/**/x\n"],
        ),
    ],
)
def test_rules_allow_the_texts_that_they_are_of(
    definition: str, right: Sequence[str], wrong: Sequence[str]
):
    grammar = lark(definition)
    for escapes in (PLAIN, TAGGED):
        assert [is_allowed(grammar, text, escapes) for text in right] == [True] * len(right)
        assert [is_allowed(grammar, text, escapes) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ("start: A", "unknown name"),
        ('start: "a" | (', "Expected token"),
        ("start: A\nA: /[a-z&&b]/", "the class [a-z&&b]"),
        ("start: A\nA: /a(?=b)/", "look-around"),
        ("start: %json {}", "it uses %json"),
        ("start: <|x|>", "special tokens"),
        ('start: W S | "(" start ")"\nS: /"[a-z\\n]*"/\nW: /[ \\n]+/', "W may go on"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_by_what_it_uses(
    definition: str, problem: str
):
    with pytest.raises(InvalidRequestError, match=re.escape(problem)):
        lark(definition).written(check_grammar, PLAIN)
