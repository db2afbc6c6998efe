"""The rule of the table over all of it: a value that asks for nothing is accepted and changes
nothing; one that asks for what this server lacks is a 400 that names it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema_rs
import pytest
from hypothesis import strategies

from cadenza.checkpoint import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.errors import ApiError
from cadenza.server.limits import ServerLimits
from cadenza.server.schemas.body import DeclaredObject, Effect
from cadenza.server.schemas.field_types import FieldType, Unsupported
from cadenza.server.schemas.messages import ChatMessage, TextPart
from cadenza.server.schemas.other_engines import OtherEnginesBody
from tests.cli.harness import write_model
from tests.server.bodies import BODIES, GENERATING
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine

PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the fox", "max_tokens": 6},
    "chat": {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 6},
}
NEEDED_ELSEWHERE: dict[str, dict[str, Any]] = {
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6},
    "embeddings": {"input": "x"},
    "rerank": {"query": "x", "documents": ["y"]},
    "ollama_chat": {"messages": [{"role": "user", "content": "x"}]},
    "ollama_generate": {"prompt": "x"},
    "ollama_embed": {"input": "x"},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
}

OPENAI = {
    "completions": """best_of echo frequency_penalty logit_bias logprobs max_tokens model n
        presence_penalty prompt seed stop stream stream_options suffix temperature top_p user""",
    "chat": """audio frequency_penalty function_call functions logit_bias logprobs
        max_completion_tokens max_tokens messages metadata modalities model moderation n
        parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning_effort response_format safety_identifier seed
        service_tier stop store stream stream_options temperature tool_choice tools top_logprobs
        top_p user verbosity web_search_options""",
}
"""The fields of openai 3.54's `CompletionCreateParams`."""

_VLLM = """allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
    priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
    return_mm_kwargs return_token_ids return_token_offsets routed_experts_prompt_start session_id
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids
    stream_interval
    structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
    use_beam_search vllm_xargs watermarking add_special_tokens echo"""
VLLM = {
    "completions": _VLLM + " prompt_embeds",
    "chat": _VLLM
    + """ add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text""",
}
"""What vLLM's `CompletionRequest` and `ChatCompletionRequest` have besides."""

MESSAGE_MEMBERS = """role content name refusal audio tool_calls function_call tool_call_id
    annotations reasoning reasoning_content tools id cache_control"""

LABELS: dict[str, tuple[list[Any], list[Any]]] = {
    "metadata": (
        [{}, {"team": "blue"}, {"k" * 64: "v" * 512}, {str(place): "" for place in range(16)}],
        [{str(place): "" for place in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, []],
    ),
    "safety_identifier": (["", "u" * 256], ["u" * 257, 1, {}]),
    "session_id": (["", "s" * 256], ["s" * 257, 1, {}]),
    "prompt_cache_key": (["", "k" * 256], ["k" * 257, 1, {}]),
    "prompt_cache_options": (
        [{}, {"mode": "implicit", "ttl": "30m"}, {"mode": "explicit"}, {"later": 1}],
        [{"mode": "none"}, {"ttl": "x" * 17}, []],
    ),
    "prompt_cache_retention": (["in_memory", "24h"], ["forever", 24, ""]),
    "return_mm_kwargs": ([True, False], [0, "false", {}]),
    "store": ([True, False], [0, "true", {}]),
    "service_tier": (["auto", "priority", ""], ["s" * 257, 1, {}]),
}
"""For each label of the table values that are accepted, and values beyond its bounds."""

ODD = [
    *(0, 1, -1, 2, 1.5, 10**400, True, False),
    *("", "x", "auto", "required", "high", "\ud800", "a" * 100_000),
    *([], [{}], [1], ["text", "audio"], [None], {}, {"type": "json"}, {"": None}, {"a": {"b": []}}),
]

MEMBER_LABELS: list[Any] = ["", [], {"type": "ephemeral"}, "x", "\ud800", "x" * 17_000, 5]
"""Values of a label in history, of which every one is taken."""


def members_without_effect(declared: type[DeclaredObject]) -> dict[str, FieldType[Any]]:
    fields = declared.fields.values()
    return {field.name: field.type for field in fields if field.effect is Effect.NONE}


OTHER_MEMBERS = members_without_effect(ChatMessage)
OTHER_PART_MEMBERS = members_without_effect(TextPart)


@dataclass(frozen=True, slots=True)
class Case:
    """One value of one field of one endpoint."""

    endpoint: str
    name: str
    value: Any

    @property
    def body(self) -> dict[str, Any]:
        return {**NEEDED[self.endpoint], self.name: self.value}


def is_same_json(left: Any, right: Any) -> bool:
    return json.dumps(left) == json.dumps(right)


def unbuilt_fields() -> Iterator[tuple[str, str, Unsupported]]:
    for endpoint in PATHS:
        for name, field in BODIES[endpoint].fields.items():
            is_other = OtherEnginesBody.fields.get(name) is field
            if isinstance(field.type, Unsupported) and not is_other:
                yield endpoint, name, field.type


def labels() -> Iterator[tuple[str, str]]:
    """Those of other engines are in `test_other_engines`."""
    for endpoint in PATHS:
        for name, field in BODIES[endpoint].fields.items():
            is_other = OtherEnginesBody.fields.get(name) is field
            is_label = field.effect is Effect.NONE and not isinstance(field.type, Unsupported)
            if is_label and not is_other:
                yield endpoint, name


def harmless_cases() -> Iterator[Case]:
    for endpoint, name, kind in unbuilt_fields():
        for value in (*kind.harmless, None):
            yield Case(endpoint, name, value)
    for endpoint, name in labels():
        for value in (*LABELS[name][0], None):
            yield Case(endpoint, name, value)
    for endpoint in PATHS:
        yield Case(endpoint, "a_field_of_tomorrow", None)
        yield Case(endpoint, "\ud800", None)
        yield Case(endpoint, "stream_options", None)
        yield Case(endpoint, "response_format", {"type": "text", "json_schema": None})
    yield Case("chat", "top_logprobs", 0)
    yield Case("chat", "tools", [])
    yield Case("chat", "tool_choice", "none")
    yield Case("chat", "tool_choice", "auto")
    yield Case("chat", "parallel_tool_calls", False)
    yield Case("chat", "chat_template_kwargs", {"of_tomorrow": None})
    yield Case("chat", "chat_template_kwargs", {"of_tomorrow": 5, "enable_thinking": False})


def harmful_cases() -> Iterator[Case]:
    for endpoint, name, kind in unbuilt_fields():
        for value in ODD:
            if not any(is_same_json(value, each) for each in kind.harmless):
                yield Case(endpoint, name, value)


def shown(case: Any) -> str:
    return f"{case.endpoint}-{case.name}-{case.value!r}"[:60].encode("ascii", "replace").decode()


@pytest.fixture(scope="module")
def watched_engine(script: tuple[int, ...]) -> ScriptedEngine:
    return ScriptedEngine(script)


@pytest.fixture(scope="module")
def served(watched_engine: ScriptedEngine, text: TextFrontend) -> Iterator[RunningServer]:
    with running_server(watched_engine, text) as running:
        yield running


def post(server: RunningServer, endpoint: str, body: dict[str, Any]) -> httpx.Response:
    """As JSON of ASCII alone, in which half a surrogate pair can be sent."""
    headers = {"content-type": "application/json"}
    with server.client() as client:
        return client.post(PATHS[endpoint], content=json.dumps(body), headers=headers)


def check_same(server: RunningServer, engine: ScriptedEngine, endpoint: str, body: Any) -> None:
    """The engine is asked for what it is asked for without it, and the answer is the same."""
    plain = post(server, endpoint, NEEDED[endpoint])
    asked = engine.submitted[-1]
    answer = post(server, endpoint, body)
    assert answer.status_code == 200, answer.text
    assert engine.submitted[-1] == asked
    assert engine.submitted[-1] is not asked
    own, without = ({**each.json(), "id": 0, "created": 0} for each in (answer, plain))
    assert own == without


def test_the_table_has_every_field_of_openai_and_vllm() -> None:
    for endpoint in PATHS:
        assert set(OPENAI[endpoint].split()) <= set(BODIES[endpoint].fields)
        assert set(VLLM[endpoint].split()) <= set(BODIES[endpoint].fields)


def test_every_label_has_its_samples() -> None:
    assert {name for _, name in labels()} == set(LABELS)


@pytest.mark.parametrize("case", list(harmless_cases()), ids=shown)
def test_a_value_that_asks_for_nothing_changes_nothing(
    served: RunningServer, watched_engine: ScriptedEngine, case: Case
) -> None:
    check_same(served, watched_engine, case.endpoint, case.body)


@pytest.mark.parametrize("endpoint", PATHS)
def test_all_that_ask_for_nothing_change_nothing_together(
    served: RunningServer, watched_engine: ScriptedEngine, endpoint: str
) -> None:
    cases = [case for case in harmless_cases() if case.endpoint == endpoint]
    given = {case.name: case.value for case in cases if case.value is not None}
    assert len(given) > 20
    check_same(served, watched_engine, endpoint, {**NEEDED[endpoint], **given})
    body = {**NEEDED[endpoint], "stream": True}
    streams = [
        streamed(served.events(PATHS[endpoint], each)[:-1])
        for each in (body, {**body, **given, "stream_options": {"include_obfuscation": False}})
    ]
    assert streams[0] == streams[1]


def streamed(events: list[Any]) -> dict[str, Any]:
    """The members of a stream's only choice, its text joined however it was cut into events."""
    found: dict[str, str] = {}
    for event in events:
        for choice in event["choices"]:
            for member, value in {**choice, **choice.get("delta", {})}.items():
                if isinstance(value, str):
                    found[member] = found.get(member, "") + value
    return {**found, "members": sorted({name for event in events for name in event})}


@pytest.mark.parametrize(
    ("endpoint", "name", "what"),
    [(endpoint, name, kind.what) for endpoint, name, kind in unbuilt_fields()],
)
def test_a_value_that_asks_for_what_is_missing_is_refused_by_name(
    endpoint: Any, name: str, what: str
) -> None:
    cases = [case for case in harmful_cases() if (case.endpoint, case.name) == (endpoint, name)]
    assert len(cases) > 15
    for case in cases:
        with pytest.raises(ApiError) as refused:
            GENERATING[endpoint].read(json.dumps(case.body).encode(), ServerLimits())
        error = refused.value
        assert (error.status, error.code, error.param) == (400, "unsupported_field", name), case
        assert error.message.startswith(f"{name}: {what} is not built"), case


def test_what_may_be_sent_instead_is_told(served: RunningServer) -> None:
    body = {**NEEDED["chat"], "function_call": "required"}
    error = post(served, "chat", body).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "function_call")
    assert error["message"].endswith('leave the field out or send "none" or "auto"')


@pytest.mark.parametrize(("endpoint", "name"), list(labels()))
def test_a_label_is_bounded(endpoint: Any, name: str) -> None:
    for value in LABELS[name][1]:
        with pytest.raises(ApiError) as refused:
            BODIES[endpoint].check({**NEEDED[endpoint], name: value})
        assert (refused.value.status, refused.value.param) == (400, name), value
        assert refused.value.body()


@pytest.mark.parametrize("endpoint", BODIES)
def test_where_fields_are_strict_an_unknown_one_is_accepted_as_null_only(endpoint: Any) -> None:
    needed = {**NEEDED, **NEEDED_ELSEWHERE}[endpoint]
    assert BODIES[endpoint].check({**needed, "frob": None}) == BODIES[endpoint].check(needed)
    for value in (False, 0, "", [], {}):
        with pytest.raises(ApiError) as refused:
            BODIES[endpoint].check({**needed, "frob": value}, "refuse")
        assert (refused.value.code, refused.value.param) == ("unknown_field", "frob")


def test_stream_options_refuse_obfuscation_by_name(served: RunningServer) -> None:
    body = {**NEEDED["chat"], "stream": True, "stream_options": {"include_obfuscation": True}}
    error = post(served, "chat", body).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "stream_options")
    assert "include_obfuscation" in error["message"]


def message_cases() -> Iterator[tuple[str, Any]]:
    for name, kind in OTHER_MEMBERS.items():
        good = kind.harmless if isinstance(kind, Unsupported) else MEMBER_LABELS
        for value in (*good, None):
            yield name, value
    yield "a_member_of_tomorrow", None
    yield "a_member_of_tomorrow", {"x": ["y"]}


def part_cases() -> Iterator[tuple[str, Any]]:
    for name in OTHER_PART_MEMBERS:
        for value in (*MEMBER_LABELS, None):
            yield name, value
    yield "a_member_of_tomorrow", None
    yield "a_member_of_tomorrow", 5


@pytest.mark.parametrize(("name", "value"), list(message_cases()), ids=lambda each: repr(each)[:30])
def test_a_member_of_a_message_that_asks_for_nothing_changes_nothing(
    served: RunningServer, watched_engine: ScriptedEngine, name: str, value: Any
) -> None:
    body = {**NEEDED["chat"], "messages": [{"role": "user", "content": "the fox", name: value}]}
    check_same(served, watched_engine, "chat", body)


@pytest.mark.parametrize(("name", "value"), list(part_cases()), ids=lambda each: repr(each)[:30])
def test_a_label_of_a_content_part_changes_nothing(
    served: RunningServer, watched_engine: ScriptedEngine, name: str, value: Any
) -> None:
    part = {"type": "text", "text": "the fox", name: value}
    body = {**NEEDED["chat"], "messages": [{"role": "user", "content": [part]}]}
    check_same(served, watched_engine, "chat", body)


def bad_messages() -> Iterator[tuple[str, Any]]:
    for name, kind in OTHER_MEMBERS.items():
        harmless = kind.harmless if isinstance(kind, Unsupported) else ODD
        for value in ODD:
            if not any(is_same_json(value, each) for each in harmless):
                yield name, {"role": "assistant", "content": "x", name: value}
    for value in (0, "", [], {}):
        yield "frob", {"role": "user", "content": "x", "frob": value}
        yield "frob", {"role": "user", "content": [{"type": "text", "text": "x", "frob": value}]}


def test_a_member_of_a_message_that_asks_for_more_is_refused_where_fields_are_strict() -> None:
    cases = list(bad_messages())
    assert len(cases) > 20
    for name, message in cases:
        with pytest.raises(ApiError) as refused:
            BODIES["chat"].check({"messages": [message]}, "refuse")
        assert (refused.value.status, refused.value.param) == (400, "messages"), message
        assert name in refused.value.message
        assert refused.value.body()


def test_a_message_may_have_every_member_that_the_schemas_have() -> None:
    properties = BODIES["chat"].object_schema()["properties"]["messages"]["items"]["properties"]
    assert set(MESSAGE_MEMBERS.split()) <= set(properties)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_two_names(name: str) -> None:
    message = {"role": "assistant", "content": "x", name: "because"}
    (found,) = BODIES["chat"].check({"messages": [message]})["messages"]
    assert found["reasoning_content"] == "because"
    same = {**message, "reasoning": "because", "reasoning_content": "because"}
    assert BODIES["chat"].check({"messages": [same]})["messages"] == (found,)
    (two,) = BODIES["chat"].check({"messages": [{**same, "reasoning": "why not"}]})["messages"]
    assert two["reasoning_content"] == "because"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> TextFrontend:
    """Of a model whose template has a switch for thinking, which is on unless it is set."""
    folder: Path = write_model(tmp_path_factory.mktemp("models") / "thinking")
    file = folder / "tokenizer_config.json"
    statements = json.loads(file.read_text())
    template = (
        "{{ messages[0].content }}"
        "{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}"
    )
    file.write_text(json.dumps({**statements, "chat_template": template}))
    return TextFrontend(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("changes", "is_quick"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {}}, True),
    ],
)
def test_no_effort_of_reasoning_turns_the_templates_thinking_off(
    script: tuple[int, ...], thinking: TextFrontend, changes: dict[str, Any], is_quick: bool
) -> None:
    engine = ScriptedEngine(script)
    with running_server(engine, thinking) as server:
        answer = post(server, "chat", {**NEEDED["chat"], **changes})
    assert answer.status_code == 200, answer.text
    told = thinking.decode(engine.submitted[-1].prompt_token_ids)
    assert told == ("the fox quick" if is_quick else "the fox")


def test_a_server_for_gateways_ignores_fields_that_it_does_not_know(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script)
    unknown = {"maxtokens": 1, "provider": {"order": ["x"]}, "\ud800": [None]}
    with running_server(engine, text, options(unknown_fields="ignore")) as server:
        for endpoint in PATHS:
            check_same(server, engine, endpoint, {**NEEDED[endpoint], **unknown})
            refused = post(server, endpoint, {**NEEDED[endpoint], **unknown, "mirostat": 2})
            assert refused.json()["error"]["param"] == "mirostat"
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            plain, changed = server.post(path, body), server.post(path, {**body, "frob": 1})
            assert (changed.status_code, changed.json()) == (200, plain.json())
        described = server.get("/openapi.json").json()
    route = described["paths"]["/v1/completions"]["post"]
    schema = route["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is True


json_values = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**53), 2**53)
    | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.text(max_size=80),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=70), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS_THAT_GO_NOWHERE = [*labels(), *((endpoint, name) for endpoint, name, _ in unbuilt_fields())]
VALIDATORS = {
    endpoint: jsonschema_rs.validator_for(BODIES[endpoint].object_schema()) for endpoint in PATHS
}


@hypothesis.settings(max_examples=400, deadline=None, database=None, derandomize=True)
@hypothesis.given(place=strategies.sampled_from(FIELDS_THAT_GO_NOWHERE), data=strategies.data())
def test_the_description_accepts_what_the_server_accepts(
    place: tuple[Any, str], data: strategies.DataObject
) -> None:
    endpoint, name = place
    kind = BODIES[endpoint].fields[name].type
    known = kind.harmless if isinstance(kind, Unsupported) else LABELS[name][0] + LABELS[name][1]
    value = data.draw(strategies.sampled_from([*known, None]) | json_values)
    body = {**NEEDED[endpoint], name: value}
    try:
        checked = BODIES[endpoint].check(body)
    except ApiError:
        checked = None
    assert VALIDATORS[endpoint].is_valid(body) == (checked is not None), body
    if checked is not None and name != "reasoning_effort":
        assert checked == BODIES[endpoint].check(NEEDED[endpoint])
