"""The fields of bodies: each changes something, or has no effect by its meaning, or is refused by
its name; values are taken up to their bounds and no further; the description says the same.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
from hypothesis import strategies
from openai.types import chat, completion_create_params

from cadenza.bounds import NumberBound
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import BOUNDS, DEFAULTS, PARAMETERS, SamplingParams
from cadenza.server.errors import ApiError
from cadenza.server.fields.body import DeclaredObject, Effect
from cadenza.server.fields.messages import ChatMessage, TextPart
from cadenza.server.fields.other_engines import OtherEnginesBody
from cadenza.server.fields.sampling import MostTokens, StopTexts
from cadenza.server.fields.types import (
    AnyJson,
    Boolean,
    FieldType,
    Integer,
    Number,
    TokenIds,
    Unsupported,
)
from cadenza.server.limits import ServerLimits
from cadenza.sparse_prefill import PromptSpan, SpecPrefillChoice
from tests.server.bodies import BODIES, GENERATING, NEEDED, PATHS, USER, checked, read, refusal
from tests.server.harness import RunningServer
from tests.server.scripted_engine import ScriptedEngine

_VLLM = """allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
    priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
    return_mm_kwargs return_token_ids return_token_offsets routed_experts_prompt_start session_id
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids
    stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens
    truncation_side use_beam_search vllm_xargs watermarking add_special_tokens echo"""
VLLM = {
    "completions": _VLLM + " prompt_embeds",
    "chat": _VLLM
    + """ add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text""",
}
"""The fields of vLLM's `CompletionRequest` and `ChatCompletionRequest` that OpenAI's API lacks."""
OPENAI: dict[str, Any] = {
    "completions": completion_create_params.CompletionCreateParamsBase,
    "chat": chat.completion_create_params.CompletionCreateParamsBase,
}
MESSAGE_MEMBERS = """role content name refusal audio tool_calls function_call tool_call_id
    annotations reasoning reasoning_content tools id cache_control"""

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
    "spec_prefill": {"keep": 0.5, "threshold": 100, "when": "cold", "spans": [[2, 9]]},
}
"""For each sampling field a value that is not its default."""
KEPT: dict[str, Any] = {
    "logit_bias": ((5, 1.5),),
    "spec_prefill": SpecPrefillChoice(
        keep=0.5, threshold=100, when="cold", spans=(PromptSpan(2, 9),)
    ),
}

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
"""For each label of completions and chats values that are accepted, and values out of bounds."""

ODD: list[Any] = [
    *(0, 1, -1, 2, 1.5, 10**400, True, False),
    *("", "x", "auto", "required", "high", "\ud800", "a" * 100_000),
    *([], [{}], [1], ["text", "audio"], [None], {}, {"type": "json"}, {"": None}, {"a": {"b": []}}),
]
MEMBER_LABELS: list[Any] = ["", [], {"type": "ephemeral"}, "x", "\ud800", "x" * 17_000, 5]
"""Values of a label in history, of which every one is taken."""
OPENAI_BODIES = ("completions", "chat")


def unsupported_fields(name: str) -> dict[str, Unsupported]:
    fields = BODIES[name].fields.items()
    return {key: field.type for key, field in fields if isinstance(field.type, Unsupported)}


def labels(name: str) -> set[str]:
    """Those of other engines take any value."""
    return {
        key
        for key, field in BODIES[name].fields.items()
        if field.effect is Effect.NONE
        and not isinstance(field.type, Unsupported)
        and OtherEnginesBody.fields.get(key) is not field
    }


def is_among(value: Any, values: Any) -> bool:
    return any(json.dumps(value) == json.dumps(each) for each in values)


def test_the_table_has_every_field_of_openai_and_vllm() -> None:
    for name in OPENAI_BODIES:
        own = {*OPENAI[name].__annotations__, "stream", *VLLM[name].split()}
        assert own <= BODIES[name].fields.keys()
    assert set(MESSAGE_MEMBERS.split()) <= ChatMessage.fields.keys()


def test_each_sampling_field_is_one_of_sampling_params() -> None:
    own = set(SamplingParams.__dataclass_fields__)
    for name in OPENAI_BODIES:
        fields = BODIES[name].fields.values()
        sampling = {field.target for field in fields if field.effect is Effect.SAMPLING}
        assert sampling | {"logprobs", "structured"} == own
        assert sampling == set(SAMPLES)
    assert set(BOUNDS) <= own


@pytest.mark.parametrize("name", OPENAI_BODIES)
def test_a_sampling_field_is_described_as_the_parameter_is_declared(name: str) -> None:
    for field in BODIES[name].fields.values():
        if field.effect is not Effect.SAMPLING or field.is_alias or field.name == "max_tokens":
            continue
        declared, default = PARAMETERS[field.name], DEFAULTS[field.name]
        assert (field.help, field.default) == (declared.help, None if default == () else default)
        if isinstance(declared.within, NumberBound):
            schema = field.type.schema()
            assert (schema["minimum"], schema["maximum"]) == (
                declared.within.low,
                declared.within.high,
            )
        for other in (*declared.renamed, *declared.also):
            assert BODIES[name].fields[other].target in (field.name, other), other


@pytest.mark.parametrize("name", OPENAI_BODIES)
def test_a_sampling_field_reaches_the_sampling_params(text: TextFrontend, name: str) -> None:
    for field, value in SAMPLES.items():
        kept = KEPT.get(field, tuple(value) if isinstance(value, list) else value)
        assert getattr(read(name, **{field: value}).sampling(text), field) == kept


@pytest.mark.parametrize("name", BODIES)
def test_a_value_that_asks_for_nothing_changes_nothing(name: str) -> None:
    plain = checked(name)
    for field, kind in unsupported_fields(name).items():
        for value in (*kind.harmless, None):
            assert checked(name, **{field: value}) == plain, field
    for field in labels(name) & LABELS.keys():
        for value in (*LABELS[field][0], None):
            assert checked(name, **{field: value}) == plain, field
    for field in ("a_field_of_tomorrow", "\ud800"):
        assert checked(name, "refuse", **{field: None}) == plain


@pytest.mark.parametrize("name", BODIES)
def test_a_value_that_asks_for_what_is_not_built_is_refused_by_name(name: str) -> None:
    for field, kind in unsupported_fields(name).items():
        asking = [value for value in ODD if not is_among(value, kind.harmless)]
        assert len(asking) > 15
        for value in asking:
            error = refusal(name, **{field: value})
            assert (error.status, error.code, error.param) == (400, "unsupported_field", field)
            assert error.message.startswith(f"{field}: {kind.what} is not built"), value


def test_the_error_says_what_may_be_sent_instead() -> None:
    error = refusal("chat", function_call="required")
    assert error.message.endswith('leave the field out or send "none" or "auto"')
    error = refusal("chat", stream=True, stream_options={"include_obfuscation": True})
    assert (error.code, error.param) == ("unsupported_field", "stream_options")
    assert "include_obfuscation" in error.message


@pytest.mark.parametrize("name", OPENAI_BODIES)
def test_a_label_is_bounded(name: str) -> None:
    assert labels(name) <= LABELS.keys()
    for field in labels(name):
        for value in LABELS[field][1]:
            assert refusal(name, **{field: value}).param == field, value


NEUTRAL: dict[str, dict[str, Any]] = {
    "completions": {"stream_options": None, "response_format": {"type": "text"}},
    "chat": {
        "response_format": {"type": "text", "json_schema": None},
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"of_tomorrow": 5, "enable_thinking": False},
    },
}


@pytest.mark.parametrize("name", ["completions", "chat", "responses", "messages"])
def test_all_that_ask_for_nothing_change_no_answer_together(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    """Fields of other engines, too."""
    given: dict[str, Any] = {**NEUTRAL.get(name, {}), "a_field_of_tomorrow": None}
    for field, kind in unsupported_fields(name).items():
        given |= {field: kind.harmless[0]} if kind.harmless else {}
    for field in BODIES[name].fields.keys() - given.keys():
        if BODIES[name].fields[field].effect is Effect.NONE and field not in unsupported_fields(
            name
        ):
            given[field] = LABELS[field][0][-1] if field in LABELS else None
    assert len(given) > 50
    length = {} if name in ("messages", "responses") else {"max_tokens": 6}
    plain, other = (
        server.post(PATHS[name], {**NEEDED[name], **length, **more}) for more in ({}, given)
    )
    assert other.status_code == 200, other.text
    first, second = engine.submitted
    assert first == second
    if name in OPENAI_BODIES:
        own, without = ({**each.json(), "id": 0, "created": 0} for each in (other, plain))
        assert own == without


def test_values_out_of_bounds_are_a_400_of_each_endpoint_that_names_the_field(
    scripted: RunningServer,
) -> None:
    for name in BODIES:
        answer = scripted.post(PATHS[name], {**NEEDED[name], "model": "x" * 257})
        assert answer.status_code == 400, name
        assert "model is 257 characters" in answer.text


def good_values(kind: FieldType[Any]) -> list[Any]:
    if isinstance(kind, Integer | Number):
        return [kind.low, kind.high]
    return [0, kind.high] if isinstance(kind, MostTokens) else []


def bad_values(kind: FieldType[Any]) -> list[Any]:
    odd = [math.nan, math.inf, -math.inf, 2**63, -(2**63), 10**400, "1", [], {}, "\ud800"]
    if isinstance(kind, Integer | Number):
        return [kind.low - 1, kind.high + 1, math.nan, True, "1"]
    if isinstance(kind, Boolean):
        return [*odd, 0, 1.5]
    if isinstance(kind, TokenIds):
        return [1, "x", [-1], [1.5], [True], [2**63], [math.nan], ["1"], [None], [[1]]]
    if isinstance(kind, StopTexts):
        return [1, [1], {}, [None], True, ["x"] * 65, "x" * 257, "\ud800"]
    if isinstance(kind, AnyJson):
        return ["x" * 17_000, [[]] * 8000]
    if isinstance(kind, MostTokens):
        return [-2, kind.high + 1, True, 1.5, *odd]
    return [math.nan, 2**63]


@pytest.mark.parametrize("name", OPENAI_BODIES)
def test_values_around_each_bound_are_taken_or_refused_by_name(name: str) -> None:
    for field, declared in BODIES[name].fields.items():
        for value in good_values(declared.type):
            assert checked(name, **{field: value})[declared.target] == value
        for value in bad_values(declared.type):
            error = refusal(name, **{field: value})
            assert (error.status, error.param) == (400, field), value


def numbers(kind: Number | Integer, source: random.Random) -> Iterator[Any]:
    """Without end: bounds and their neighbours, numbers that no type holds, and other types."""
    whole = [2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400]
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0, 0, 0.5]
    ends = [kind.low, kind.high]
    near = [end + step for end in ends for step in (-1, 0, 1)]
    next_to = [math.nextafter(float(end), to) for end in ends for to in (-math.inf, math.inf)]
    others: list[Any] = ["1", "", [], [1], {}, {"1": 1}, True, False, "NaN", "\u0661"]
    yield from [*near, *next_to, *whole, *(-each for each in whole), *odd, *others]
    while True:
        end = source.choice(ends)
        yield source.choice(
            [
                end + source.randint(-1000, 1000),
                end + source.uniform(-1, 1),
                source.randint(-(2**70), 2**70),
                source.uniform(-1e300, 1e300),
            ]
        )


def is_good(kind: Number | Integer, value: Any) -> bool:
    """Said again, in other words than the field types'."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return not (value < kind.low or value > kind.high or (isinstance(kind, Integer) and value % 1))


def test_numbers_are_taken_within_their_bounds_and_refused_by_name_beyond() -> None:
    source, num_fields = random.Random(20), 0
    for name in BODIES:
        for field, declared in BODIES[name].fields.items():
            kind, is_bias = declared.type, field == "logit_bias"
            kind = Number(-100.0, 100.0) if is_bias else kind
            if not isinstance(kind, Number | Integer):
                continue
            num_fields += 1
            for value in itertools.islice(numbers(kind, source), 60):
                given: dict[str, Any] = {field: {"5": value} if is_bias else value}
                if is_good(kind, value):
                    found = checked(name, **given)
                    assert declared.target in found or declared.effect is Effect.NONE, given
                else:
                    assert refusal(name, **given).param == field, given
    assert num_fields > 60


def test_the_answers_number_and_the_servers_cap_on_logprobs_are_bounded() -> None:
    with pytest.raises(ApiError) as refused:
        read("completions", prompt=["a"] * 129, n=16)
    assert refused.value.param == "n"
    limits = ServerLimits(max_logprobs=3)
    assert GENERATING["completions"].read(b'{"prompt": "a", "logprobs": 3}', limits)
    for body in (b'{"prompt": "a", "logprobs": 4}', b'{"prompt": "a", "prompt_logprobs": 4}'):
        with pytest.raises(ApiError, match="at most 3") as refused:
            GENERATING["completions"].read(body, limits)
        assert refused.value.param in ("logprobs", "prompt_logprobs")


def members_without_effect(declared: type[DeclaredObject]) -> dict[str, FieldType[Any]]:
    fields = declared.fields.values()
    return {field.name: field.type for field in fields if field.effect is Effect.NONE}


def test_a_member_of_a_message_that_asks_for_nothing_changes_nothing() -> None:
    plain = checked("chat")
    for member, kind in {**members_without_effect(ChatMessage), "of_tomorrow": None}.items():
        good = kind.harmless if isinstance(kind, Unsupported) else MEMBER_LABELS
        for value in (*good, None):
            assert checked("chat", messages=[{**USER, member: value}]) == plain, member
    for member in (*members_without_effect(TextPart), "of_tomorrow"):
        for value in (*MEMBER_LABELS, None):
            part = {"type": "text", "text": "the fox", member: value}
            assert checked("chat", messages=[{**USER, "content": [part]}]) == plain, member


def strict_messages() -> Iterator[tuple[str, Any]]:
    for member, kind in members_without_effect(ChatMessage).items():
        harmless = kind.harmless if isinstance(kind, Unsupported) else ODD
        for value in ODD:
            if not is_among(value, harmless):
                yield member, {"role": "assistant", "content": "x", member: value}
    for value in (0, "", [], {}):
        yield "frob", {"role": "user", "content": "x", "frob": value}
        yield "frob", {"role": "user", "content": [{"type": "text", "text": "x", "frob": value}]}


def test_a_member_of_a_message_that_asks_for_more_is_refused_where_fields_are_strict() -> None:
    cases = list(strict_messages())
    assert len(cases) > 20
    for member, message in cases:
        error = refusal("chat", "refuse", messages=[message])
        assert (error.status, error.param) == (400, "messages"), message
        assert member in error.message


def test_reasoning_has_two_names_of_which_the_older_counts() -> None:
    answer = {"role": "assistant", "content": "x"}
    for said in (
        {"reasoning": "because"},
        {"reasoning_content": "because"},
        {"reasoning": "why not", "reasoning_content": "because"},
    ):
        (found,) = checked("chat", messages=[{**answer, **said}])["messages"]
        assert found["reasoning_content"] == "because"


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
WITHOUT_EFFECT = [
    (name, field)
    for name in OPENAI_BODIES
    for field in sorted({*labels(name), *unsupported_fields(name)})
]
VALIDATORS = {
    name: jsonschema_rs.validator_for(BODIES[name].object_schema()) for name in OPENAI_BODIES
}


@hypothesis.settings(max_examples=120, deadline=None, database=None, derandomize=True)
@hypothesis.given(place=strategies.sampled_from(WITHOUT_EFFECT), data=strategies.data())
def test_the_description_accepts_what_the_server_accepts(
    place: tuple[str, str], data: strategies.DataObject
) -> None:
    name, field = place
    kind = BODIES[name].fields[field].type
    known = kind.harmless if isinstance(kind, Unsupported) else [*itertools.chain(*LABELS[field])]
    value = data.draw(strategies.sampled_from([*known, None]) | json_values)
    try:
        found = checked(name, **{field: value})
    except ApiError:
        found = None
    assert VALIDATORS[name].is_valid({**NEEDED[name], field: value}) == (found is not None)
    assert found is None or found == checked(name)


@pytest.mark.parametrize("name", BODIES)
def test_every_unsupported_field_is_described(name: str) -> None:
    properties = BODIES[name].object_schema()["properties"]
    for field, kind in unsupported_fields(name).items():
        schema = properties[field]
        assert all(jsonschema_rs.is_valid(schema, each) for each in (*kind.harmless, None)), field
        assert not jsonschema_rs.is_valid(schema, "something odd"), field
