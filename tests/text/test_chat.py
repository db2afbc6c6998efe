"""Chat templates: what they can do, and what they cannot."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError, InvalidRequestError
from cadenza.text import ChatTemplate
from cadenza.text.templates.bounds import MAX_SECONDS
from cadenza.text.templates.chat import MAX_TEMPLATE_CHARS
from cadenza.text.templates.sandbox import BoundedTemplate
from tests.checkpoint.files import write_folder

MESSAGES = [
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **kwargs)


CONSTRUCTS = {
    "{{ bos_token }}": "<s>",
    "{% for m in messages %}{{ m.role }}:{{ m['content'] | trim }};{% endfor %}": (
        "user:hi;assistant:hello;user:bye;"
    ),
    "{% for m in messages %}{{ loop.index0 }}{% if not loop.last %},{% endif %}{% endfor %}": (
        "0,1,2"
    ),
    "{% for m in messages %}{{ loop.length }}{{ loop.nextitem is defined }} {% endfor %}": (
        "3True 3True 3False "
    ),
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{% endfor %}": "12",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}": "x",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}": "xx",
    "{% for m in messages[::-1] %}{{ m.content[0] }}{% endfor %}": "bh ",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}": "3",
    "{% macro tag(x) %}<{{ x }}>{% endmacro %}{{ tag('a') ~ tag(1) }}": "<a><1>",
    "{% set text %}a{{ 1 + 1 }}{% endset %}{{ text | upper }}": "A2",
    "{% set text | upper %}a{% endset %}{{ text }}": "A",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}": "AB",
    "{{ {'é': [1, None, true]} | tojson }}": '{"é": [1, null, true]}',
    "{{ {'b': 1, 'a': '<&>'} | tojson(indent=2) }}": '{\n  "b": 1,\n  "a": "<&>"\n}',
    "{{ [1, 2] | tojson(separators=(',', ':')) }}": "[1,2]",
    "{{ '%s-%03d' | format('a', 7) }}{{ '{}!'.format(3) }}{{ 'x' * 3 }}": "a-0073!xxx",
    "{{ messages | map(attribute='role') | join(', ') }}": "user, assistant, user",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "2",
    "{{ (messages | last).content.split('y')[0].strip().upper() }}": "B",
    "{{ 'system' in messages[0] }}{{ messages[0].get('name', 'none') }}": "Falsenone",
    "{{ undefined_thing is defined }}{{ tools is none }}{{ 3 is string }}": "FalseTrueFalse",
    "{{ 'yes' if add_generation_prompt else 'no' }}": "yes",
    "{%- if true %}\n    a\n{%- endif %}\n\n": "    a",
    "a\n    {% if true %}\nb\n    {% endif %}\nc": "a\nb\nc",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}": "hello",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}": "a1",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}": "a2b1",
    "{% for x in [{'v': 1, 'c': [{'v': 2, 'c': []}]}] recursive %}{{ x.v }}{{ loop(x.c) }}"
    "{% endfor %}": "12",
    "{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | replace('a', 'cc') }}": "a\n  b|cc\nb",
    "{{ '<b>' }}": "<b>",
}


@pytest.mark.parametrize(("source", "expected"), CONSTRUCTS.items())
def test_constructs_of_published_templates_work(source: str, expected: str):
    assert render(source) == expected


def test_the_date_comes_from_the_given_clock():
    source = "{{ strftime_now('%d %b %Y') }}"
    template = ChatTemplate(source, {}, now=lambda: datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"


def test_tools_and_further_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "add"}}]
    source = "{{ tools[0].function.name }}{{ enable_thinking }}{{ add_generation_prompt }}"
    assert render(source, tools=tools, enable_thinking=False, add_generation_prompt=False) == (
        "addFalseFalse"
    )


def test_reasoning_is_found_under_each_of_its_names():
    source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}"
    template = ChatTemplate(source, {})
    for key in ("reasoning_content", "thinking", "reasoning"):
        assert template.render([{"role": "assistant", key: "hm"}]) == "hm/hm"


def test_null_fields_are_as_good_as_absent():
    source = "{{ messages[0].content is defined }}{{ messages[0] | length }}"
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert ChatTemplate(source, {}).render([message]) == "False1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinking": True}, "its options are: level, mode"),
        ({"bos_token": "x"}, "no option 'bos_token'"),
        ({"mode": [1]}, "must be a string"),
        ({"mode": "x" * 5000}, "must be a string"),
        ({"documents": "x"}, "documents must be a list"),
    ],
)
def test_an_option_that_the_template_does_not_read_is_refused(
    options: dict[str, Any], message: str
):
    template = ChatTemplate(
        "{{ mode }}{% if level is defined %}{{ level }}{% endif %}{{ bos_token }}",
        {"bos_token": "s"},
    )
    assert template.options == {"mode", "level"}
    with pytest.raises(InvalidRequestError, match=message):
        template.render(MESSAGES, **options)


def test_an_option_may_be_set_by_the_template_where_it_is_absent():
    source = "{% if not level is defined %}{% set level = 'low' %}{% endif %}{{ level }}"
    assert render(source) == "low"
    assert render(source, level="high") == "high"


def test_documents_reach_the_template():
    assert render("{{ documents[0].title }}", documents=[{"title": "A"}]) == "A"


CHATTY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def test_a_last_message_stays_open_when_it_is_to_be_continued():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATTY, **options).endswith("</><user>bye")
    assert render(CHATTY.replace("m.content", "m.content | trim"), **options).endswith("<user>bye")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render(CHATTY, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="be continued"):
        render("{{ messages[0].role }}", **options)
    with pytest.raises(InvalidRequestError, match="with text in its content"):
        ChatTemplate(CHATTY, {}).render([{"role": "user", "content": None}], **options)


def test_a_continued_message_ends_before_what_the_caller_did_not_write():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    source = "{% for p in messages[-1].content %}{{ p.text }};{% endfor %}"
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = ChatTemplate(source, {}).render([{"role": "user", "content": parts}], **options)
    assert text == "a;;b"


def test_a_template_sees_copies_and_no_objects():
    class Sneaky(str):
        def leak(self) -> str:
            return "leaked"

    messages = [{"role": "user", "content": Sneaky("hi")}]
    template = ChatTemplate(
        "{{ messages[0].content }}{{ messages[0].content.leak is defined }}", {}
    )
    assert template.render(messages) == "hiFalse"


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("source", "messages", "problem"),
    [
        ("x", [], "empty"),
        ("x", ["hi"], "must be an object"),
        *(
            ("x", [{"role": "user", "content": each}], "hold a")
            for each in (object(), b"bytes", {1, 2}, SimpleNamespace(a=1))
        ),
        ("x", [{"role": "user", "content": CIRCULAR}], "nested"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        *(
            (each, MESSAGES, "fails on these messages")
            for each in (
                *("{{ nothing.at.all }}", "{{ 1 + 'a' }}", "{{ messages[9].x }}"),
                "{% include 'x' %}",
            )
        ),
    ],
)
def test_messages_that_cannot_be_rendered_are_an_invalid_request(
    source: str, messages: list[Any], problem: str
):
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        ChatTemplate(source, {}).render(messages)
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        *(
            (each, "chat template")
            for each in ("{% for %}", "{{ a", "{% endif %}", "{{ a | nofilter }}", "{% break %}")
        ),
        ("{{ }}", "chat template"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "characters"),
    ],
    ids=lambda value: value[:20],
)
def test_a_template_that_is_not_valid_is_a_checkpoint_error(source: str, problem: str):
    with pytest.raises(CheckpointError, match=problem):
        ChatTemplate(source, {})


@pytest.mark.parametrize("source", ["(" * 5000, "{{ " + "(" * 5000, "{{ " + "-" * 100_000 + "1 }}"])
def test_a_template_that_nests_too_deep_is_an_error_or_text(source: str):
    try:
        ChatTemplate(source, {}).render(MESSAGES)
    except CheckpointError:
        return
    assert source.startswith("((")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ raise_exception.__globals__['x'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('x') }}",
    "{{ strftime_now.__closure__[0] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ''.format_map.__self__.__class__ }}",
    "{{ joiner.__call__.__func__.__code__ }}",
    "{{ 'a'.translate({97: 'b'}) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_gets_out_of_its_sandbox(source: str):
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except (CheckpointError, InvalidRequestError):
        text = ""
    assert text == ""
    assert messages == [{"role": "user", "content": "hi"}]


DOUBLING = "{% set ns = namespace(x='ab', y=[1]) %}{% for i in range(60) %}BODY{% endfor %}"


def doubling(body: str) -> str:
    return DOUBLING.replace("BODY", body)


LISTS = doubling("{% set ns.y = [ns.y, ns.y] %}")
LARGE = "{% set a = 'a' * 1000000 %}"

BOMBS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "a range too long": "{% for a in range(10 ** 9) %}{% endfor %}",
    "a long string": "{{ 'a' * 10 ** 10 }}",
    "a long list": "{{ [0] * 10 ** 9 }}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "a repeated square": "{% set ns = namespace(n=3) %}{% for i in range(64) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a wide filter": "{{ 'a' | center(10 ** 10) }}",
    "a wide method": "{{ 'a'.ljust(10 ** 10) }}",
    "a wide percent format": "{{ '%9999999999d' % 1 }}",
    "a wide percent filter": "{{ '%9999999999d' | format(1) }}",
    "a wide percent star": "{{ '%*d' % (999999999, 1) }}",
    "a wide brace format": "{{ '{:>9999999999}'.format(1) }}",
    "a nested brace format": "{{ '{:>{}}'.format(1, 999999999) }}",
    "doubling by tilde": doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by plus": doubling("{% set ns.x = ns.x + ns.x %}"),
    "doubling by percent": doubling("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "doubling by format": doubling("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "doubling by join": doubling("{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubling by a block": doubling(
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    + doubling("{% set ns.x = f(ns.x) %}"),
    "lists of lists printed": LISTS + "{{ ns.y }}",
    "lists of lists as JSON": LISTS + "{{ ns.y | tojson }}",
    "lists of lists as a string": LISTS + "{{ ns.y | string | length }}",
    "lists of lists joined": LISTS + "{{ ns.y ~ '' }}",
    "lists of lists compared": LISTS
    + "{% set z = ns.y %}"
    + doubling("{% set ns.y = [ns.y, ns.y] %}")
    + "{{ ns.y == z }}",
    "a large replacement": LARGE + "{{ a | replace('a', a) }}",
    "a large replacement by method": LARGE + "{{ a.replace('a', a) }}",
    "a replacement between all": LARGE + "{{ a.replace('', a) }}",
    "a large separator": LARGE + "{{ a | join(a) }}",
    "a large separator by method": LARGE + "{{ a.join(a) }}",
    "many indented lines": "{% set a = '\n' * 1000000 %}{{ a | indent(4000) }}",
    "a deep indentation": "{{ [1] | tojson(indent=10 ** 9) }}",
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros in two": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "loops without end": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "strings kept": "{% set ns = namespace(l=[]) %}{% set a = 'a' * 10000000 %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [a ~ i] %}{% endfor %}",
    "a long output": LARGE + "{% for i in range(9999) %}{{ a }}{% endfor %}",
    "a list of characters": "{{ ('a' * 10000000) | list | length }}",
    "many references joined": LARGE + "{{ ([{'x': a}] * 999) | map(attribute='x') | join }}",
    "many references joined by method": LARGE
    + "{{ ''.join(([{'x': a}] * 999) | map(attribute='x')) }}",
    "a long refusal": LISTS + "{{ raise_exception(ns.y) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_defused(source: str):
    with pytest.raises(InvalidRequestError, match="takes") as raised:
        render(source)
    assert len(str(raised.value)) < 200


def test_rendering_stops_when_its_time_is_over():
    ticks = iter(range(1_000_000))

    def clock() -> float:
        return next(ticks) * MAX_SECONDS / 100

    template = BoundedTemplate("{% for i in range(1000) %}x{% endfor %}", clock=clock)
    with pytest.raises(InvalidRequestError, match="seconds"):
        template.render({})


def test_long_conversations_are_within_bounds():
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}", {})
    messages = [{"role": "user", "content": "x" * 4000}] * 1000
    assert len(template.render(messages)) == 4004 * 1000


def test_counting_messages_for_each_message_is_within_bounds():
    source = "{% for m in messages %}{{ messages | length - loop.index0 }}{% endfor %}"
    messages = [{"role": "user", "content": ["x"] * 20}] * 2000
    assert ChatTemplate(source, {}).render(messages).startswith("200019991998")


def test_renderings_do_not_share_a_budget():
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done", {})
    for _ in range(8):
        assert template.render(MESSAGES) == "done"


def template_of(folder: Path) -> ChatTemplate | None:
    files = open_checkpoint(folder).tokenizer
    return ChatTemplate.of(files.chat_templates, files.special_tokens)


def test_a_checkpoints_template_sees_its_special_tokens(tmp_path: Path):
    files = {
        "chat_template.jinja": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    }
    template = template_of(write_folder(tmp_path, files))
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"


def test_a_checkpoints_template_for_tools_is_used_with_tools(tmp_path: Path):
    templates = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
    ]
    files = {"tokenizer_config.json": {"chat_template": templates}}
    template = template_of(write_folder(tmp_path, files))
    assert template is not None
    assert template.render(MESSAGES) == "D"
    assert template.render(MESSAGES, tools=[{"type": "function"}]) == "T1"


def test_a_checkpoint_without_template_has_none(tmp_path: Path):
    assert template_of(write_folder(tmp_path)) is None
