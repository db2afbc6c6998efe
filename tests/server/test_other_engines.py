"""Fields of other engines: aliases have the meaning of ours, what would change an answer is refused
by its name, and what asks for nothing changes nothing."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.endpoints.generating import CallRequest
from cadenza.server.errors import ApiError
from cadenza.server.limits import ServerLimits
from cadenza.server.schemas.body import Effect
from cadenza.server.schemas.field_types import Unsupported
from cadenza.server.schemas.other_engines import OtherEnginesBody
from cadenza.structured import StructuredOutput
from tests.server.bodies import BODIES, GENERATING
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "the fox"}]
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the fox"},
    "chat": {"messages": MESSAGES},
    "responses": {"input": "the fox"},
    "messages": {"messages": MESSAGES, "max_tokens": 6},
}
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
ALIASES: list[tuple[str, Any, str, Any]] = [
    ("n_predict", 5, "max_tokens", 5),
    ("num_predict", 5, "max_tokens", 5),
    ("max_new_tokens", 5, "max_tokens", 5),
    ("max_output_tokens", 5, "max_tokens", 5),
    ("max_completion_tokens", 5, "max_tokens", 5),
    ("min_new_tokens", 2, "min_tokens", 2),
    ("repeat_penalty", 1.5, "repetition_penalty", 1.5),
    ("stop_sequences", ["zz"], "stop", ("zz",)),
    ("truncate", 1, "truncate_prompt_tokens", 1),
    ("top_p", 0, "top_p", 1e-6),
    ("seed", -1, "seed", None),
    ("stop", "", "stop", ()),
    ("stop", ["", "zz", ""], "stop", ("zz",)),
    ("max_tokens", -1, "max_tokens", None),
    ("n_predict", -1, "max_tokens", None),
    ("options", {"num_predict": 5, "num_ctx": 4096}, "max_tokens", 5),
    ("extra_body", {"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
]
JSON_FORM = StructuredOutput(json_object=True)
FORMS: list[tuple[str, Any, StructuredOutput | None]] = [
    ("format", "json", JSON_FORM),
    ("format", {"type": "object"}, StructuredOutput(json={"type": "object"})),
    ("format", "", None),
    ("json_schema", {"type": "object"}, StructuredOutput(json={"type": "object"})),
    ("json_schema", {}, None),
    ("grammar", 'root ::= "a"', StructuredOutput(grammar='root ::= "a"')),
    ("grammar", "", None),
    ("ebnf", 'root ::= "a"', StructuredOutput(grammar='root ::= "a"')),
    ("regex", "a+", StructuredOutput(regex="a+")),
]
ASKS: dict[str, Any] = {
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "typical_p": 0.9,
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "x",
    "dynatemp_range": 0.5,
    "samplers": ["top_k", "temperature"],
    "custom_logit_processor": "x",
    "input_ids": [1],
    "structural_tag": "x",
}


def posted(server: RunningServer, endpoint: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATHS[endpoint], {**NEEDED[endpoint], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def table() -> Iterator[tuple[str, str, Any]]:
    """The fields that an endpoint has of other engines, with their types."""
    for endpoint in NEEDED:
        for name, field in BODIES[endpoint].fields.items():
            if OtherEnginesBody.fields.get(name) is field:
                yield endpoint, name, field.type


def test_an_alias_is_the_field_that_it_names(server: RunningServer, engine: ScriptedEngine) -> None:
    for name, value, own, kept in ALIASES:
        for endpoint in PATHS:
            if endpoint == "messages" and own == "max_tokens" and name != "max_tokens":
                continue  # it has that field already, which it needs
            posted(server, endpoint, **{name: value})
            found = getattr(engine.submitted[-1].params, own)
            assert found == kept, (endpoint, name, value)


def test_two_names_of_one_field_agree_or_are_refused() -> None:
    for endpoint, needed in NEEDED.items():
        same = {**needed, "repeat_penalty": 1.5, "repetition_penalty": 1.5}
        assert BODIES[endpoint].check(same)["repetition_penalty"] == 1.5
        with pytest.raises(ApiError, match="two names of one field") as refused:
            BODIES[endpoint].check({**same, "repeat_penalty": 1.1})
        assert refused.value.param == "repetition_penalty"
        inner = {**same, "options": {"repetition_penalty": 1.1}}
        with pytest.raises(ApiError, match=r"repetition_penalty and options\.repetition_penalty"):
            BODIES[endpoint].check(inner)
        both = {**needed, "extra_body": {"top_k": 7}, "options": {"top_k": 8}}
        with pytest.raises(ApiError, match=r"extra_body\.top_k and options\.top_k differ"):
            BODIES[endpoint].check(both)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_form_may_be_asked_for_by_the_names_of_others(endpoint: str, text: TextFrontend) -> None:
    def read(**fields: Any) -> CallRequest:
        body = json.dumps({**NEEDED[endpoint], **fields}).encode()
        return GENERATING[endpoint].read(body, ServerLimits())

    for name, value, form in FORMS:
        request = read(**{name: value})
        assert request.sampling(text).structured == form, (name, value)
        assert request.has_form == (form is not None)
    with pytest.raises(ApiError, match="grammar both ask for a form"):
        read(grammar="start: A", guided_regex="x")


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
@pytest.mark.parametrize(
    "name", ["format", "json_schema", "grammar", "ebnf", "regex", "response_format", "guided_json"]
)
def test_where_such_a_name_is_not_taken_nothing_is_answered_without_the_form(
    endpoint: str, name: str
) -> None:
    value = {"type": "object"} if name != "grammar" else "x"
    with pytest.raises(ApiError, match="a form by this field at this endpoint") as refused:
        BODIES[endpoint].check({**NEEDED[endpoint], name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("endpoint", NEEDED)
def test_what_would_change_an_answer_is_refused_by_name(endpoint: str) -> None:
    for name, value in ASKS.items():
        for given in ({name: value}, {"options": {name: value}}):
            with pytest.raises(ApiError, match="is not built yet") as refused:
                BODIES[endpoint].check({**NEEDED[endpoint], **given})
            assert refused.value.param == name


def test_values_that_ask_for_nothing_and_labels_change_nothing(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    for endpoint in PATHS:
        neutral: dict[str, Any] = {}
        for place, name, kind in table():
            if place != endpoint:
                continue
            if isinstance(kind, Unsupported):
                for value in (*kind.harmless, None):
                    assert BODIES[endpoint].check({**NEEDED[endpoint], name: value})
                if kind.harmless:
                    neutral[name] = kind.harmless[0]
            elif BODIES[endpoint].fields[name].effect is Effect.NONE:
                neutral[name] = {"any": ["value"]}
        assert len(neutral) > 50
        plain = posted(server, endpoint)
        asked = engine.submitted[-1]
        other = posted(server, endpoint, **neutral)
        assert engine.submitted[-1].params == asked.params
        assert other.keys() == plain.keys()


def test_the_table_is_described() -> None:
    for endpoint, name, kind in table():
        schema = BODIES[endpoint].object_schema()["properties"][name]
        values = [*kind.harmless, None] if isinstance(kind, Unsupported) else [None]
        assert all(jsonschema_rs.is_valid(schema, value) for value in values), (endpoint, name)
        if isinstance(kind, Unsupported):
            assert not jsonschema_rs.is_valid(schema, "something odd")


@pytest.mark.parametrize("endpoint", NEEDED)
def test_a_window_of_penalties_is_refused_where_there_is_a_penalty(endpoint: str) -> None:
    body = BODIES[endpoint]
    for harmless in ({}, {"repeat_penalty": 1}, {"presence_penalty": 0.0}):
        assert body.check({**NEEDED[endpoint], "repeat_last_n": 64, **harmless})
    whole = {"repeat_penalty": 1.5, "repeat_last_n": -1}
    assert body.check({**NEEDED[endpoint], **whole})["repetition_penalty"] == 1.5
    for penalty in ({"repeat_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}):
        with pytest.raises(ApiError, match="the whole of prompt and output") as refused:
            body.check({**NEEDED[endpoint], "repeat_last_n": 64, **penalty})
        assert refused.value.param == "repeat_last_n"


def test_the_top_token_is_that_of_top_p_zero() -> None:
    assert SamplingParams(top_p=0).top_p == SamplingParams(top_p=1e-9).top_p == 1e-6


def test_an_answer_without_a_bound_goes_to_the_end_of_the_context(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script, max_model_len=64)
    with running_server(engine, text) as server:
        for endpoint in PATHS:
            name = "max_output_tokens" if endpoint == "responses" else "max_tokens"
            answer = posted(server, endpoint, **{name: -1})
            usage = answer["usage"]
            num_input = usage.get("prompt_tokens", usage.get("input_tokens"))
            num_output = usage.get("completion_tokens", usage.get("output_tokens"))
            assert num_input + num_output == 64, endpoint
