"""Fields of other engines: aliases have the meaning of ours, and what would change an answer is
refused by its name. `test_fields` has what asks for nothing.
"""

from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.errors import ApiError
from cadenza.structured import StructuredOutput
from tests.server.bodies import checked, read, refusal

NAMES = ("completions", "chat", "responses", "messages")
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
    (
        "response_format",
        {"type": "json_object", "value": {"type": "object"}},
        StructuredOutput(json={"type": "object"}),
    ),
    ("response_format", {"type": "json", "value": True}, StructuredOutput(json=True)),
    ("response_format", {"type": "regex", "value": "a+"}, StructuredOutput(regex="a+")),
]
ASKS: dict[str, Any] = {
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "typical_p": 0.9,
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "x",
    "dynatemp_range": 0.5,
    "banned_strings": ["x"],
    "banned_tokens": [1],
    "custom_token_bans": "1,2",
    "ban_eos_token": True,
    "response_prefix": "x",
    "samplers": ["top_k", "temperature"],
    "custom_logit_processor": "x",
    "input_ids": [1],
    "structural_tag": "x",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_is_the_field_that_it_names(text: TextFrontend, name: str) -> None:
    for alias, value, own, kept in ALIASES:
        if name == "messages" and own == "max_tokens" and alias != "max_tokens":
            continue  # it has that field already, which it needs
        params = read(name, **{alias: value}).sampling(text)
        assert getattr(params, own) == kept, (alias, value)


@pytest.mark.parametrize("name", NAMES)
def test_two_names_of_one_field_agree_or_are_refused(name: str) -> None:
    same = {"repeat_penalty": 1.5, "repetition_penalty": 1.5}
    assert checked(name, **same)["repetition_penalty"] == 1.5
    error = refusal(name, **{**same, "repeat_penalty": 1.1})
    assert "two names of one field" in error.message
    assert error.param == "repetition_penalty"
    error = refusal(name, **same, options={"repetition_penalty": 1.1})
    assert "repetition_penalty and options.repetition_penalty" in error.message
    assert checked(name, top_k=7, options={"top_k": None})["top_k"] == 7
    error = refusal(name, extra_body={"top_k": 7}, options={"top_k": 8})
    assert "extra_body.top_k and options.top_k differ" in error.message


@pytest.mark.parametrize("name", ["completions", "chat"])
def test_a_form_may_be_asked_for_by_the_names_of_others(name: str, text: TextFrontend) -> None:
    for field, value, form in FORMS:
        request = read(name, **{field: value})
        assert request.sampling(text).structured == form, (field, value)
        assert request.has_form == (form is not None)
    with pytest.raises(ApiError, match="grammar both ask for a form"):
        read(name, grammar="start: A", guided_regex="x")


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_where_such_a_name_is_not_taken_nothing_is_answered_without_the_form(name: str) -> None:
    for field in {"response_format", "guided_json", *(field for field, _, form in FORMS if form)}:
        value = "x" if field == "grammar" else {"type": "object"}
        error = refusal(name, **{field: value})
        assert "a form by this field at this endpoint" in error.message
        assert error.param == field


@pytest.mark.parametrize("name", NAMES)
def test_what_would_change_an_answer_is_refused_by_name(name: str) -> None:
    for field, value in ASKS.items():
        for given in ({field: value}, {"options": {field: value}}):
            error = refusal(name, **given)
            assert "is not built yet" in error.message
            assert error.param == field


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_penalties_is_refused_where_there_is_a_penalty(name: str) -> None:
    for harmless in ({}, {"repeat_penalty": 1}, {"presence_penalty": 0.0}):
        assert checked(name, repeat_last_n=64, **harmless)
    assert checked(name, repeat_penalty=1.5, repeat_last_n=-1)["repetition_penalty"] == 1.5
    for penalty in ({"repeat_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}):
        error = refusal(name, repeat_last_n=64, **penalty)
        assert "the whole of prompt and output" in error.message
        assert error.param == "repeat_last_n"


def test_the_top_token_is_that_of_top_p_zero() -> None:
    assert SamplingParams(top_p=0).top_p == SamplingParams(top_p=1e-9).top_p == 1e-6
