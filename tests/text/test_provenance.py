"""Marks follow text through what templates do with it, and never spread to anybody else's."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.errors import CheckpointError
from cadenza.text import ChatTemplate
from cadenza.text.tokens.provenance import MarkedText, join_marked, written_by_template

OWN, OTHER = "abAB <>.", "mnMN \t\n:"
PARTS = st.lists(st.text(OWN, max_size=4).map(written_by_template) | st.text(OTHER, max_size=4))
TEXTS = PARTS.map(join_marked)


def marks(text: str) -> str:
    """The marked characters, and a dot for each other one."""
    is_own = text.is_own if isinstance(text, MarkedText) else lambda start, stop: False
    return "".join(char if is_own(at, at + 1) else "·" for at, char in enumerate(text))


def flat(result: Any) -> list[str]:
    return [result] if isinstance(result, str) else list(result)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda text: text.strip(),
    "strip of characters": lambda text: text.strip("am <"),
    "lstrip": lambda text: text.lstrip(),
    "rstrip": lambda text: text.rstrip("\n"),
    "removeprefix": lambda text: text.removeprefix("a"),
    "removesuffix": lambda text: text.removesuffix("m"),
    "lower": lambda text: text.lower(),
    "upper": lambda text: text.upper(),
    "title": lambda text: text.title(),
    "capitalize": lambda text: text.capitalize(),
    "split": lambda text: text.split(),
    "split at a letter": lambda text: text.split("a"),
    "split once": lambda text: text.split("m", 1),
    "split at two": lambda text: text.split("aa"),
    "rsplit": lambda text: text.rsplit(None, 1),
    "rsplit at a letter": lambda text: text.rsplit("<", 1),
    "splitlines": lambda text: text.splitlines(),
    "splitlines with ends": lambda text: text.splitlines(keepends=True),
    "partition": lambda text: text.partition("m"),
    "rpartition": lambda text: text.rpartition(" "),
    "replace": lambda text: text.replace("a", "mm"),
    "replace once": lambda text: text.replace("m", "", 1),
    "slice": lambda text: text[1:-1],
    "reverse": lambda text: text[::-1],
    "repeat": lambda text: text * 2,
    "repeat from the left": lambda text: 2 * text,
    "add": lambda text: text + "mn",
    "add to": lambda text: "mn" + text,
    "join": lambda text: text.join(["m", "n", "m"]),
    "center": lambda text: text.center(20, "m"),
}


@given(text=TEXTS)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_gives_what_strings_give_and_marks_only_own_letters(
    operation: Callable[[Any], Any], text: MarkedText
):
    results = flat(operation(text))
    assert results == flat(operation(str.__str__(text)))
    for result in results:
        for own, char in zip(marks(result), result, strict=True):
            assert own == "·" or char in OWN + OWN.upper() + OWN.lower()


@given(text=TEXTS)
@pytest.mark.parametrize(
    "operation", [OPERATIONS[name] for name in OPERATIONS if name not in ("reverse", "center")]
)
def test_an_operation_keeps_every_mark(operation: Callable[[Any], Any], text: MarkedText):
    for result in flat(operation(text)):
        for own, char in zip(marks(result), result, strict=True):
            assert own == char or char not in "abAB<>."


TEMPLATES = {
    "{{ '<' + messages[0].content + '>' }}": "<·>",
    "<{{ messages[0].content }}>": "<·>",
    "{{ '<' ~ messages[0].content ~ '>' }}": "<·>",
    "{% set t = '<' %}{{ t }}{{ messages[0].content }}": "<·",
    "{% set t %}<{{ messages[0].content }}{% endset %}{{ t | trim }}": "<·",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}": "<·>",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}{{ messages[0].content }}!"
    "{% endcall %}": "<·!>",
    "{% filter upper %}a{{ messages[0].content }}{% endfilter %}": "A·",
    "{% filter replace('·', 'x') %}{{ messages[0].content }}{% endfilter %}": "·",
    "{% generation %}<{{ messages[0].content }}{% endgeneration %}": "<·",
    "{{ '<%s>' % messages[0].content }}": "<·>",
    "{{ '<%s %d>' | format(messages[0].content, 7) }}": "<· ·>",
    "{{ '%s' % '<' }}{{ '%5s%%' % '<' }}": "<·····%",
    "{{ '<{}{x}>'.format(messages[0].content, x='[') }}": "<·[>",
    "{{ messages[0].content.format('<') }}": "·",
    "{{ ['<', messages[0].content] | join('|') }}": "<|·",
    "{{ ['<', '>'] | join('|') }}{{ ['<', '>'] | join }}": "<|><>",
    "{{ ', '.join([messages[0].content, '<']) }}": "·, <",
    "{{ messages[0].content.join(['<', '<']) }}": "···",
    "{{ messages[0].content | default('<') }}{{ missing | default('<') }}": "·<",
    "{{ '<' if messages else '>' }}{{ ('<', messages[0].content)[1] }}": "<·",
    "{% for x in ['<', messages[0].content] %}{{ x }}{% endfor %}": "<·",
    "{% set ns = namespace(x='<') %}{% set ns.x = ns.x + messages[0].content %}{{ ns.x }}": "<·",
    "{{ {'a': '<'}.a }}{{ {'a': '<'} | tojson }}": "<" + "·" * 10,
    "{{ messages | length }}{{ missing }}": "·",
    "{{ bos_token + messages[0].role + messages[1].role }}": "<s>user···",
}


@pytest.mark.parametrize(("source", "expected"), TEMPLATES.items())
def test_a_template_marks_its_own_text(source: str, expected: str):
    messages = [{"role": "user", "content": "X"}, {"role": "odd"}]
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    assert marks(rendered) == expected


def test_text_offers_templates_no_more_than_strings_do():
    source = "{{ bos_token.own_spans is defined }}{{ bos_token.is_own is defined }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user"}]) == "FalseFalse"


@pytest.mark.parametrize("name", ["own", "own constant", "kept", "concatenated", "measured"])
def test_a_template_cannot_mark_what_a_user_wrote(name: str):
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(f"{{{{ messages[0].content | {name} }}}}", {})
