"""The fields of bodies: each one changes something, or is refused by its name; bounds hold."""

import json
import math
from typing import Any

import pytest

from cadenza.request import BOUNDS, SamplingParams
from cadenza.server.endpoints.completions import COMPLETIONS, CompletionRequest
from cadenza.server.errors import ApiError
from cadenza.server.limits import ServerLimits
from cadenza.server.schemas.body import Effect
from cadenza.server.schemas.field_types import (
    AnyJson,
    Boolean,
    FieldType,
    Integer,
    Number,
    TokenIds,
)
from cadenza.server.schemas.generation import MostTokens, StopTexts
from tests.server.bodies import BODIES
from tests.server.harness import RunningServer
from tests.server.scripted_engine import ScriptedEngine

COMPLETION = {"prompt": "the fox", "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 6}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

SAMPLES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.25,
    "top_n_sigma": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 7,
    "max_tokens": 3,
    "min_tokens": 2,
    "stop": ["fox"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "n": 2,
    "prompt_logprobs": 1,
    "logit_bias": {"5": 1.5},
    "bad_words": ["fox"],
    "allowed_token_ids": [5, 6],
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "speculative": True,
}
"""For each sampling field a value that is not its default."""

SHOWN: dict[str, Any] = {"logit_bias": ((5, 1.5),)}


def test_each_sampling_field_is_one_of_sampling_params() -> None:
    own = set(SamplingParams.__dataclass_fields__)
    for endpoint in PATHS:
        fields = BODIES[endpoint].fields.values()
        sampling = {field.target for field in fields if field.effect is Effect.SAMPLING}
        assert sampling | {"logprobs", "structured"} == own
        assert sampling == set(SAMPLES)
    assert set(BOUNDS) <= own


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sampling_field_reaches_the_engine_or_is_refused_by_name(
    server: RunningServer, engine: ScriptedEngine, endpoint: str, name: str
) -> None:
    body = COMPLETION if endpoint == "completions" else CHAT
    answer = server.post(PATHS[endpoint], {**body, name: SAMPLES[name]})
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == name
        return
    assert answer.status_code == 200, answer.text
    found = getattr(engine.submitted[-1].params, name)
    wanted = SHOWN.get(name, SAMPLES[name])
    assert found == (tuple(wanted) if isinstance(wanted, list) else wanted)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": 1},
        {"role": "assistant", "content": "x", "tool_calls": "f"},
        {"role": "assistant", "content": "x", "tool_calls": ["f"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "king", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 1},
        "hello",
    ],
)
def test_a_message_that_is_not_understood_is_refused(scripted: RunningServer, message: Any) -> None:
    answer = scripted.post(PATHS["chat"], {"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag", "xml"])
def test_other_forms_of_answers_are_refused(scripted: RunningServer, kind: str) -> None:
    answer = scripted.post(PATHS["chat"], {**CHAT, "response_format": {"type": kind}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    plain = scripted.post(PATHS["chat"], {**CHAT, "response_format": {"type": "text"}})
    assert plain.status_code == 200


ODD = [math.nan, math.inf, -math.inf, 2**63, -(2**63), 10**400, "1", [], {}, True, 1.5, "\ud800"]


def good_values(kind: FieldType[Any]) -> list[Any]:
    if isinstance(kind, Integer):
        return [kind.low, kind.high]
    if isinstance(kind, MostTokens):
        return [0, kind.high]
    if isinstance(kind, Number):
        return [kind.low, kind.high]
    return []


def bad_values(kind: FieldType[Any]) -> list[Any]:
    if isinstance(kind, Integer | Number):
        around = [kind.low - 1, kind.high + 1]
        fits = {
            Integer: lambda v: type(v) is int and kind.low <= v <= kind.high,
            Number: lambda v: v == 1.5 and kind.low <= v <= kind.high,
        }
        return [*around, *(value for value in ODD if not fits[type(kind)](value))]
    if isinstance(kind, Boolean):
        return [value for value in ODD if value is not True]
    if isinstance(kind, TokenIds):
        return [1, "x", [-1], [1.5], [True], [2**63], [math.nan], ["1"], [None], [[1]]]
    if isinstance(kind, StopTexts):
        return [1, [1], {}, [None], True, ["x"] * 65, "x" * 257, "\ud800"]
    if isinstance(kind, AnyJson):
        return ["x" * 17_000, [[]] * 8000]
    if isinstance(kind, MostTokens):
        return [-2, kind.high + 1, *(value for value in ODD if value != -1)]
    return [math.nan, 2**63]


@pytest.mark.parametrize(
    ("endpoint", "name"), [(e, name) for e in ("completions", "chat") for name in BODIES[e].fields]
)
def test_values_around_each_bound_are_taken_or_refused_by_name(endpoint: Any, name: str) -> None:
    body = BODIES[endpoint]
    kind = body.fields[name].type
    required = {"prompt": "x"} if endpoint == "completions" else {"messages": CHAT["messages"]}
    for value in good_values(kind):
        assert body.check({**required, name: value})[body.fields[name].target] == value
    for value in bad_values(kind):
        with pytest.raises(ApiError) as refused:
            body.check({**required, name: value})
        assert (refused.value.status, refused.value.param) == (400, name), value


def test_an_answers_number_is_bounded_by_prompts_times_n() -> None:
    body = json.dumps({"prompt": ["a"] * 129, "n": 16}).encode()
    with pytest.raises(ApiError) as refused:
        COMPLETIONS.read(body, ServerLimits())
    assert refused.value.param == "n"


def test_the_servers_own_cap_on_logprobs_holds() -> None:
    limits = ServerLimits(max_logprobs=3)
    request = COMPLETIONS.read(b'{"prompt": "a", "logprobs": 3}', limits)
    assert isinstance(request, CompletionRequest)
    assert request.num_top_logprobs == 3
    with pytest.raises(ApiError) as refused:
        COMPLETIONS.read(b'{"prompt": "a", "logprobs": 4}', limits)
    assert refused.value.param == "logprobs"
