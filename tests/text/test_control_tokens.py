"""Control tokens are the template's: what a user spells stays text, whatever the tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.errors import CheckpointError
from cadenza.text import ChatTemplate, Tokenizer
from cadenza.text.tokens.provenance import MarkedText, join_marked, written_by_template
from tests.text.vocabularies import KINDS, byte_level, first_metaspace, gemma_like, unigram

TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.thought %}<tool>{{ m.thought }}<tool>{% endif %}"
    "{{ m.content | trim }}{{ '<|end|>' ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PIECES = [
    "<|",
    "start|>",
    "<|start|>",
    "<|end|>",
    "<tool>",
    "<s>",
    "</s>",
    "a ",
    "\n",
    "🙂",
    " the",
]
WORDS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), max_size=30)

shared = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def controls(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    names = {index: text for text, index in tokenizer.added_tokens.items() if text[0] in "<["}
    return [names[token_id] for token_id in token_ids if names.get(token_id, "<unk>") != "<unk>"]


@shared
@given(words=WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_user_text_becomes_a_control_token(
    tokenizers: dict[str, Tokenizer], kind: str, words: str
):
    tokenizer = tokenizers[kind]
    assert controls(tokenizer, tokenizer.encode(words, add_special_tokens=False)) == []


@shared
@given(words=WORDS, more=WORDS)
def test_a_conversation_has_the_templates_control_tokens_and_no_others(
    tokenizers: dict[str, Tokenizer], words: str, more: str
):
    tokenizer = tokenizers["byte_level"]
    template = ChatTemplate(TURNS, {"bos_token": "<|start|>"})
    messages = [{"role": "user", "content": words, "thought": more}, {"role": more, "content": "x"}]
    text = template.render(messages)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    tools = ["<tool>", "<tool>"] if more else []
    first = ["<|start|>", "<|start|>", *tools, "<|end|>"]
    assert controls(tokenizer, token_ids) == [*first, "<|start|>", "<|end|>", "<|start|>"]
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_text_that_a_user_spells_over_several_parts_stays_text(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    template = ChatTemplate("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", {})
    parts = [{"text": "<|en"}, {"text": "d|>"}]
    text = template.render([{"role": "user", "content": parts}])
    assert text == "<|end|>"
    assert 1 not in tokenizer.encode(text, add_special_tokens=False)


def test_text_that_a_template_changes_into_a_control_token_stays_text(
    tokenizers: dict[str, Tokenizer],
):
    tokenizer = tokenizers["byte_level"]
    template = ChatTemplate("{{ messages[0].content | lower | replace('x', '') }}", {})
    text = template.render([{"role": "user", "content": "<|XEND|>"}])
    assert text == "<|end|>"
    assert 1 not in tokenizer.encode(text, add_special_tokens=False)


def test_a_known_role_may_be_part_of_a_control_token_and_no_other(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
):
    from tokenizers import Tokenizer as NativeTokenizer

    native = NativeTokenizer.from_file(str(byte_level(tmp_path / "t.json")))
    native.add_special_tokens(["<|user|>"])
    native.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(tmp_path / "t.json")
    template = ChatTemplate("{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}", {})
    text = template.render([{"role": "user"}, {"role": "end"}])
    assert controls(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == ["<|user|>"]


@shared
@given(before=PLAIN, after=PLAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_the_renamed_copy_encodes_ordinary_text_as_the_tokenizer_does(
    tokenizers: dict[str, Tokenizer], kind: str, before: str, after: str
):
    """The careful way is taken only where a user spells a control token, and is no other way."""
    tokenizer = tokenizers[kind]
    control = next((text for text in tokenizer.added_tokens if text[0] == "<"), "")
    text = join_marked([before, written_by_template(control), after])
    for add_special_tokens in (False, True):
        careful = tokenizer._encode_renamed(text, add_special_tokens)
        expected = tokenizer._native.encode(
            str.__str__(text), add_special_tokens=add_special_tokens
        )
        assert careful == expected.ids


def test_the_check_of_the_copy_can_fail(tokenizers: dict[str, Tokenizer]):
    """Encoding the parts one by one, the obvious other way, puts a space where there is none."""
    tokenizer = tokenizers["first_metaspace"]
    whole = tokenizer.encode(
        join_marked([written_by_template("<s>"), "the dog"]), add_special_tokens=False
    )
    parts = tokenizer.encode(written_by_template("<s>"), add_special_tokens=False)
    parts += tokenizer.encode("the dog", add_special_tokens=False)
    assert whole != parts


def test_added_words_and_runs_of_spaces_are_text_and_keep_their_tokens(
    tokenizers: dict[str, Tokenizer],
):
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.id_of("日本") in tokenizer.encode("日本 <|end|>")
    assert tokenizer.id_of("<tool>") not in tokenizer.encode("<tool>")
    assert tokenizer.id_of("<tool>") in tokenizer.encode(written_by_template("<tool>"))


@pytest.mark.parametrize("make", [unigram, gemma_like, first_metaspace])
def test_a_piece_of_the_vocabulary_that_is_a_control_token_is_not_reached_by_text(
    make: Any, tmp_path: Path
):
    tokenizer = Tokenizer(make(tmp_path / "t.json"))
    token_ids = tokenizer.encode("say <s> twice <s>", add_special_tokens=False)
    assert tokenizer.id_of("<s>") not in token_ids
    marked = MarkedText("say <s>", ((4, 7),))
    assert tokenizer.encode(marked, add_special_tokens=False)[-1] == tokenizer.id_of("<s>")


def test_unknown_characters_are_no_forgery(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["unigram"]
    unknown = tokenizer.id_of("<unk>")
    assert unknown in tokenizer.encode("語 the dog")
    assert tokenizer.encode("語 <s>") != tokenizer.encode(written_by_template("語 <s>"))


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
