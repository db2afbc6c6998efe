"""Tools and reasoning over HTTP, on the bundled model, whose template renders tools."""

import json
from functools import cache
from typing import Any

import jsonschema_rs
import openai
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt, TextWorkers
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import OutputPart
from cadenza.request import SamplingParams
from cadenza.server.anthropic.blocks import message_tools
from cadenza.server.anthropic.messages import MessageRequest
from cadenza.server.errors import ApiError
from cadenza.server.fields.body import UnknownFields, UnknownMembers, taking_unknown
from cadenza.server.fields.tools import chat_tools, function_tools
from cadenza.server.openai.chat import ChatRequest
from cadenza.server.openai.response_items import response_tools
from cadenza.server.openai.responses import ResponseRequest
from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.answers.tool_format import Tool
from cadenza.text.schemas.grammar import FormChecks, GrammarCheck, check_grammar
from cadenza.text.schemas.json_schema import JsonGrammar, compile_schema
from cadenza.text.schemas.schema_check import is_valid
from tests.server.bodies import BODIES
from tests.server.harness import RunningServer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 12}},
}
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, NOW]
BODY = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 80}


def choice_of(server: RunningServer, **fields: Any) -> Any:
    answer = server.post(CHAT, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_required_call_is_made_with_arguments_of_the_schema(bundled: RunningServer) -> None:
    for seed in range(3):
        hot = {"temperature": 1.5, "seed": seed, "parallel_tool_calls": False}
        choice = choice_of(bundled, tool_choice="required", **hot)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        assert call["type"] == "function"
        assert call["id"].isalnum()
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert (name, arguments) == ("now", {}) or (name, set(arguments)) == (
            "get_weather",
            {"city"},
        )


def test_a_required_call_may_come_with_a_form_which_only_texts_have(bundled: RunningServer) -> None:
    """As clients send a loop of calls whose final answer is an object."""
    form = {"type": "json_schema", "json_schema": {"schema": CITY}}
    fields = {"response_format": form, "temperature": 0, "parallel_tool_calls": False}
    called = choice_of(bundled, **fields, tool_choice="required")
    assert called["message"]["content"] is None
    assert len(called["message"]["tool_calls"]) == 1
    told = choice_of(bundled, **fields, tool_choice="none")["message"]
    assert "tool_calls" not in told
    assert json.loads(told["content"]).keys() == {"city"}


def test_the_model_decides_under_auto_and_sees_no_tools_under_none(bundled: RunningServer) -> None:
    decided = choice_of(bundled, temperature=0)
    assert decided["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    none = choice_of(bundled, temperature=0, tool_choice="none")
    assert "tool_calls" not in none["message"]
    plain = bundled.post(CHAT, {"messages": MESSAGES, "max_tokens": 80, "temperature": 0}).json()
    assert none["message"]["content"] == plain["choices"][0]["message"]["content"]


def test_the_official_client_has_a_whole_tool_loop(bundled: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0)
    with client:
        model = client.models.list().data[0].id
        messages: list[Any] = [*MESSAGES]
        first = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",  # type: ignore[call-overload]
        )
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
        last = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="none",
            max_tokens=20,  # type: ignore[call-overload]
        )
    assert last.choices[0].message.content


def test_calls_in_messages_become_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    }
    assistant, tool = BODIES["chat"].check(body)["messages"]
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}


# Reasoning and calls of other families, in the plans of a front end.


@pytest.fixture(scope="module")
def thoughtful() -> TextFrontend:
    parsers = AnswerParsers(reasoning="qwen3", tool_calls="mistral")
    return TextFrontend(open_checkpoint(None), parsers=parsers)


def parts_of(prepared: Any, answer: str) -> list[OutputPart]:
    parser = prepared.make_parser()
    return [*parser.push(answer), *parser.flush()]


def test_reasoning_is_split_off_and_the_form_begins_behind_it(thoughtful: TextFrontend) -> None:
    params = SamplingParams(structured=StructuredOutput(regex="[0-9]+"))
    prepared = thoughtful.prepare(
        ChatPrompt(messages=[{"role": "user", "content": "x"}], asked=AskedAnswer()), params
    )
    assert parts_of(prepared, "<think>\nwhy\n</think>\n12") == [
        OutputPart("reasoning", "why"),
        OutputPart("content", "12"),
    ]
    assert prepared.request.constraint is not None
    grammar = prepared.request.constraint.grammar
    assert grammar is not None
    assert check_grammar(grammar) is None
    assert "THOUGHT" in grammar


def test_a_tools_parameters_become_a_grammar_once(
    thoughtful: TextFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def counted(schema: str, style: JsonStyle, *, is_strict: bool) -> JsonGrammar:
        given.append(schema)
        return compile_schema(schema, style, is_strict=is_strict)

    monkeypatch.setattr("cadenza.frontend.answers.compile_schema", counted)
    tools = (Tool(name="f", parameters=CITY), Tool(name="g"))
    use = ToolUse(tools=tools, choice="required")
    thoughtful.prepare(
        ChatPrompt(messages=[{"role": "user", "content": "x"}], asked=AskedAnswer(use=use)),
        SamplingParams(),
    )
    assert given == [tool.schema for tool in tools]


@pytest.mark.soak
def test_tools_that_fit_only_by_themselves_are_refused_before_they_reach_the_engine(
    thoughtful: TextFrontend,
) -> None:
    """The library cannot hold the grammar of all together; its message was a panic's."""
    assert thoughtful.tokenizer is not None
    items = [{"properties": {f"a{i}": {"const": i}}, "type": "object"} for i in range(200)]
    large = {"type": "array", "prefixItems": items}
    planner = AnswerPlanner("", thoughtful.tokenizer, AnswerParsers())
    check = cache(check_grammar)
    tools = tuple(Tool(name=f"f{i}", parameters=large) for i in range(60))
    for fitting in (tools[:1], tools[:4]):
        use = ToolUse(tools=fitting, choice="required")
        plan = planner.plan("", None, AskedAnswer(use=use), check)
        assert plan.constraint is not None
    too_many = ToolUse(tools=tools, choice="required")
    with pytest.raises(InvalidRequestError, match=r"tools together .* too many parts") as refused:
        planner.plan("", None, AskedAnswer(use=too_many), check)
    assert refused.value.param == "tools"


def test_tools_beside_a_form_and_reasoning_are_checked_as_one_grammar() -> None:
    checked: list[str] = []
    num_requests = 0

    def start_checks() -> GrammarCheck:
        nonlocal num_requests
        num_requests += 1
        return check

    def check(grammar: str) -> str | None:
        checked.append(grammar)
        return check_grammar(grammar)

    parsers = AnswerParsers(reasoning="qwen3", tool_calls="hermes")
    checks = FormChecks(start=start_checks, is_valid=is_valid)
    text = TextFrontend(open_checkpoint(None), workers=TextWorkers(checks=checks), parsers=parsers)
    params = SamplingParams(structured=StructuredOutput(regex="[0-9]+"), n=8)
    use = ToolUse(tools=(Tool(name="f"),))
    text.prepare(
        ChatPrompt(messages=[{"role": "user", "content": "x"}], asked=AskedAnswer(use=use)), params
    )
    assert num_requests == 1, "all of a request's grammars have one bound on their time"
    _form, _arguments, whole = checked  # once, however many samples there are
    for part in ("THOUGHT", "[0-9]+", "args_0", "call_0"):
        assert part in whole


def test_the_parsers_can_be_chosen(thoughtful: TextFrontend) -> None:
    use = ToolUse(tools=(Tool(name="f"),))
    prepared = thoughtful.prepare(
        ChatPrompt(messages=[{"role": "user", "content": "x"}], asked=AskedAnswer(use=use)),
        SamplingParams(),
    )
    parts = parts_of(prepared, '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert parts == [OutputPart("tool_call", "{}", "f")]
    for wrong in ({"reasoning": "x"}, {"tool_calls": "none"}):
        with pytest.raises(ConfigError, match="is not one of auto"):
            AnswerParsers(**wrong)


_F = {"name": "f", "parameters": CITY}
POLICIES: tuple[UnknownFields, ...] = ("refuse", "suggest", "ignore")
_CUSTOM = {"name": "f", "input_schema": CITY}
_NESTED = {"type": "function", "function": _F}


OF_DAY = {"type": "object", "properties": {"day": {"type": "string"}}}
FORMS_OF_ONE_TOOL: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now", "parameters": OF_DAY}},
    {"type": "function", "function": {"name": "now", "input_schema": OF_DAY}},
    {"type": "function", "name": "now", "function": {"parameters": OF_DAY}},
    {"type": "function", "name": "now", "parameters": OF_DAY},
    {"type": "function", "name": "now", "input_schema": OF_DAY},
]


@pytest.mark.parametrize("kind", [chat_tools, response_tools], ids=["chat", "responses"])
def test_a_tool_may_have_the_form_of_another_api(kind: Any) -> None:
    for form in FORMS_OF_ONE_TOOL:
        (tool,) = kind.check("tools", [form])
        assert (tool.name, tool.parameters) == ("now", OF_DAY), form
    (tool,) = chat_tools.check("tools", [{"name": "now", "input_schema": OF_DAY}])
    assert (tool.name, tool.parameters) == ("now", OF_DAY)
    with pytest.raises(ApiError, match="parameters and input_schema differ"):
        kind.check("tools", [{**FORMS_OF_ONE_TOOL[3], "input_schema": {}}])


@pytest.mark.parametrize(
    ("kind", "plain", "labels"),
    [
        (function_tools, _NESTED, {"function": {**_F, "return": {"type": "string"}}}),
        (function_tools, _NESTED, {"strict": True, "name": "f", "cache_control": {}}),
        (response_tools, {"type": "function", **_F}, {"output_schema": {}, "defer_loading": False}),
        (message_tools, _CUSTOM, {"allowed_callers": ["direct"], "return": {}}),
    ],
)
def test_labels_of_tools_change_nothing_and_odd_members_are_refused_unless_ignored(
    kind: Any, plain: dict[str, Any], labels: dict[str, Any]
) -> None:
    odd = [{**plain, "odd": 1}]
    if "function" in plain:
        odd.append({**plain, "function": {**_F, "odd": 1}})
    harmless: list[dict[str, Any]] = [{}, labels, dict.fromkeys(("defer_loading", "odd"))]
    tools = kind.check("tools", [plain])
    for policy in POLICIES:
        with taking_unknown(UnknownMembers(policy)) as unknown:
            schema = kind.schema()
            for labelled in harmless:
                assert kind.check("tools", [{**plain, **labelled}]) == tools
                assert jsonschema_rs.is_valid(schema, [{**plain, **labelled}])
            for tool in odd:
                assert jsonschema_rs.is_valid(schema, [tool]) is (policy != "refuse")
                if policy != "refuse":
                    assert kind.check("tools", [tool]) == tools
                    assert unknown.ignored == ("tools.odd",)
                else:
                    with pytest.raises(ApiError, match="'odd'"):
                        kind.check("tools", [tool])
            built_not = [{**plain, "defer_loading": True}]
            assert not jsonschema_rs.is_valid(schema, built_not)
            with pytest.raises(ApiError, match="defer_loading"):
                kind.check("tools", built_not)


@pytest.mark.parametrize("body", [ChatRequest, ResponseRequest, MessageRequest])
def test_tools_are_bounded_by_bytes_alone_and_their_names_by_128_characters(body: Any) -> None:
    def tool(name: str) -> dict[str, Any]:
        plain = _CUSTOM if body is MessageRequest else {"type": "function", **_F}
        if body is ChatRequest:
            return {**_NESTED, "function": {**_F, "name": name}}
        return {**plain, "name": name}

    given = {"messages": MESSAGES, "input": "x", "max_tokens": 5}
    known = {name: value for name, value in given.items() if name in body.required_names}
    many = [tool("f" * 120 + str(place)) for place in range(1000)]
    found = body.check({**known, "tools": many})["tools"]
    assert [len(each.name) for each in found][::999] == [121, 123]
    assert body.check({**known, "tools": [tool("f" * 128)]})["tools"][0].name == "f" * 128
    with pytest.raises(ApiError, match="1 to 128"):
        body.check({**known, "tools": [tool("f" * 129)]})
    with pytest.raises(ApiError, match="two tools with the name"):
        body.check({**known, "tools": [*many, many[500]]})
