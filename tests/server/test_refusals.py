"""What no endpoint can answer is refused with the name of the field and what is wrong with it.

`reported_requests.json` has more of these, as clients sent them.
"""

from typing import Any

import pytest

from cadenza.errors import CadenzaError, InvalidRequestError
from cadenza.frontend.loaded_model import LoadedModel
from cadenza.frontend.prepared_request import OWN_TERMS
from cadenza.server.errors import ApiError
from cadenza.server.limits import ServerLimits
from tests.server.bodies import GENERATING, NEEDED, PATHS, USER, read
from tests.server.harness import RunningServer

Case = tuple[dict[str, Any], str, str]
"""The fields, the one that is named, and words of the message."""

PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
FLAT = {"type": "function", "name": "now", "description": "The time.", "parameters": PARAMETERS}
OWN = {"name": "now", "input_schema": PARAMETERS}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
IMAGE_BLOCK = {"type": "image", "source": {"type": "url", "url": "https://a.example/a.png"}}
STRICT_NOT = {"schema": {"not": {}}, "strict": True}
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


def function(**members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **members}}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def assistant(**members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x", **members}]}


CASES: dict[str, list[Case]] = {
    "chat": [
        (said("x", "king"), "messages", "'king'"),
        (said(1), "messages", "content 1"),
        (said(None), "messages", "content None"),
        *(
            (said([{"type": kind, **part}]), "messages", words)
            for kind, part, words in (
                ("image_url", {}, "image_url is missing"),
                ("image_url", {"image_url": 5}, "image_url is 5"),
                ("image_url", {"image_url": {}}, "image_url.url is missing"),
                ("image_url", {"image_url": {"url": "x", "detail": "fine"}}, "auto, low, high"),
                ("image_url", {"image_url": ""}, "image_url is 0 characters"),
                ("input_image", {"file_id": "f"}, "an image by file_id is not built"),
                ("image", {"image": "x"}, "a content part"),
                ("image_embeds", {"image_embeds": "x"}, "image_embeds is not built"),
                ("video_url", {"video_url": {"url": "x"}}, "video_url is not built"),
                ("input_audio", {"input_audio": {}}, "input_audio is not built"),
            )
        ),
        (
            {
                "prediction": {
                    "type": "content",
                    "content": [{"type": "image_url", "image_url": "data:,"}],
                }
            },
            "prediction",
            "an image here",
        ),
        ({"messages": ["hello"]}, "messages", "a message is an object"),
        ({"messages": [{**USER, "tool_call_id": 1}]}, "messages", "tool_call_id 1"),
        (assistant(tool_calls="f"), "messages", "no list"),
        (assistant(tool_calls=["f"]), "messages", "a call is an object"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [NOW], "tool_choice": "every"}, "tool_choice", "none, auto, required"),
        ({"tools": [{"type": "custom"}]}, "tools", "custom"),
        ({"tools": [{"type": "function"}]}, "tools", "a list of tools"),
        ({"tools": [{**NOW, "functions": {}}]}, "tools", "did you mean function?"),
        ({"tools": [function(paramters={})]}, "tools", "did you mean parameters?"),
        ({"tools": [function(name="a b")]}, "tools", "'a b'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural tags"),
        (
            {"structured_outputs": {"regex": "a", "whitespace": "any"}},
            "structured_outputs",
            "whitespace",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
        ({"guided_choice": [1]}, "guided_choice", "list of texts"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "characters"),
        ({"think": True, "enable_thinking": False}, "think", "give one of them"),
        ({"reasoning_effort": "low", "think": "high"}, "think", "give one of them"),
        ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning", "for 5 and"),
        ({"reasoning": {"exclude": True}}, "reasoning", "leaving reasoning out"),
        ({"thinking": "perhaps"}, "thinking", "true, false, one of"),
        ({"reasoning_format": "none"}, "reasoning_format", "reasoning in the content"),
        ({"separate_reasoning": False}, "separate_reasoning", "reasoning in the content"),
        *(
            ({"prediction": value}, "prediction", "prediction")
            for value in (
                *("x", 1, [], {}, {"type": "content"}, {"type": None, "content": "x"}),
                *({"type": "content", "content": each} for each in (None, 1, [{}])),
                {"type": "content", "content": "x", "also": 1},
            )
        ),
        *(
            ({"spec_prefill": value}, "spec_prefill", "spec_prefill")
            for value in (
                *("on", 0.3, [], {"model": "m"}, {"keep": 0}, {"keep": "1"}, {"threshold": -1}),
                *({"when": "hot"}, {"spans": [[1]]}, {"spans": [[5, 5]]}, {"spans": [[0, 1]] * 65}),
            )
        ),
        *(
            ({"speculative": value}, "speculative", "speculative")
            for value in (
                *("x", 3, [], {}, {"num_speculative_tokens": 3, "also": 1}),
                *({"num_speculative_tokens": each} for each in (None, 0, 17, True, "3")),
            )
        ),
    ],
    "responses": [
        ({"input": []}, "input", "no items"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "id is missing"),
        ({"input": [{"role": "user"}]}, "input[0]", "content is missing"),
        *(
            (
                {"input": [{"role": role, "content": [{"type": "input_image", **part}]}]},
                "input[0]",
                words,
            )
            for role, part, words in (
                ("user", {"file_id": "f"}, "an image by file_id is not built"),
                ("user", {}, "image_url is missing"),
                ("user", {"image_url": {"url": "x"}}, "image_url is"),
                ("user", {"image_url": "x", "detail": "fine"}, "auto, low, high"),
                ("assistant", {"image_url": "x"}, "an assistant's message"),
            )
        ),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"truncation": "middle"}, "truncation", "auto, disabled"),
        ({"top_logprobs": 2}, "top_logprobs", "log probabilities"),
        ({"include": ["message.output_text.logprobs"]}, "include", "output_text.logprobs"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "grammar"),
        ({"text": {"verbosity": "chatty"}}, "text", "one of low, medium, high"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "summary"),
        ({"tools": [{"type": "mcp"}]}, "tools", "those of the type function are served"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "a function with its name",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [{**FLAT, "paramters": {}}]}, "tools", "did you mean parameters?"),
        ({"tools": [{**FLAT, "defer_loading": True}]}, "tools", "defer_loading"),
        ({"max_tool_calls": 0}, "max_tool_calls", "from 1"),
        ({"max_tokens": 5, "max_output_tokens": 6}, "max_output_tokens", "are two names"),
        ({"n": 2}, "n", "several answers at this endpoint"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "set stream"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "surrogate"),
        ({"tools": [{**FLAT, "description": "\ud800"}]}, "tools", "surrogate"),
        ({"tools": [{"type": "\ud800"}]}, "tools", "ud800"),
        ({"text": {"format": {"type": "\ud800"}}}, "text", "ud800"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"enum": ["\ud800"]}}}},
            "text",
            "surrogate",
        ),
        ({"include": ["\ud800"]}, "include", "ud800"),
        ({"input": [{"type": "\ud800"}]}, "input[0]", "ud800"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0]", "surrogate"),
        ({"previous_response_id": "\ud800"}, "previous_response_id", "surrogate"),
    ],
    "messages": [
        ({"messages": []}, "messages", "from 1 to"),
        (said("x", "tool"), "messages[0]", "the roles are"),
        (said([{"type": "image"}]), "messages[0].content", "source is missing"),
        *(
            (said([{"type": "image", "source": source}]), "messages[0].content", words)
            for source, words in (
                ({"type": "file", "file_id": "f"}, "an uploaded file is not built"),
                ({"type": "video"}, "one of the types base64, url"),
                ({"type": "base64", "media_type": "image/bmp", "data": "AA=="}, "image/webp"),
                ({"type": "base64", "media_type": "image/png"}, "data is missing"),
                ("x", "an object"),
            )
        ),
        (said([IMAGE_BLOCK], "assistant"), "messages[0].content", "the content block 'image'"),
        (said([IMAGE_BLOCK], "system"), "messages[0].content", "the content block 'image'"),
        (said([{"type": "tool_use"}]), "messages[0].content", "tool_use"),
        (said([CALL], "assistant"), "messages", "the last message"),
        ({"max_tokens": None}, "max_tokens", "max_tokens is missing"),
        ({"max_tokens": -2}, "max_tokens", "-1 for what is left"),
        ({"tools": [{"name": "f"}]}, "tools", "input_schema"),
        ({"tools": [{**OWN, "defer_loading": True}]}, "tools", "defer_loading"),
        ({"tools": [{**OWN, "descripton": "x"}]}, "tools", "did you mean description?"),
        ({"tools": [{**OWN, "input_examples": ["x"]}]}, "tools", "input_examples"),
        ({"tools": [{**OWN, "allowed_callers": ["code"]}]}, "tools", "allowed_callers"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks", "another model"),
        ({"compaction": {"type": "summarize"}}, "compaction", "compaction"),
        (
            {"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}},
            "billing_policy",
            "who is billed",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_format",
            "both ask for a form",
        ),
        ({"tools": [OWN, OWN]}, "tools", "two tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tools": [OWN], "tool_choice": {"type": "tool"}}, "tool_choice", '"name": …'),
        ({"tools": [OWN], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "'x'"),
        ({"thinking": {}}, "thinking", "thinking.type"),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 2000}},
            "thinking",
            "with the type enabled",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "editing the context",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers", "servers of tools"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config", "json_schema"),
        ({"stop": ["x"], "stop_sequences": ["y"]}, "stop_sequences", "two names of one field"),
        (said([{"type": "\ud800"}]), "messages[0].content", "ud800"),
        ({"tools": [{"type": "\ud800"}]}, "tools", "ud800"),
    ],
    "ollama_chat": [
        (said("x", "judge"), "messages", "'judge'"),
        ({"options": {"mirostat": 2}}, "options", "options.mirostat: mirostat sampling"),
        ({"options": {"tfs_z": 0.5}}, "options", "options.tfs_z"),
        ({"options": {"typical_p": 0.7}}, "options", "options.typical_p"),
        (
            {"options": {"repeat_penalty": 1.1, "penalize_newline": False}},
            "options.penalize_newline",
            "without line breaks",
        ),
        ({"options": {"temperature": "hot"}}, "options", "options.temperature"),
        ({"options": {"temprature": 0.5}}, "options", "did you mean temperature?"),
        ({"options": 3}, "options", "options is 3"),
        ({"format": "yaml"}, "format", '"json" or a JSON Schema'),
        ({"think": "much"}, "think", "true, false or one of low, medium, high"),
        ({"messages": [{**USER, "images": "aGk="}]}, "messages", "a list of images"),
        ({"messages": [{**USER, "images": [5]}]}, "messages", "a text of 1 to"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ],
    "ollama_generate": [
        ({"images": "aGk="}, "images", "a list of images"),
        ({"images": ["aGk="], "raw": True}, "images", "raw has no place for images"),
        ({"suffix": "end"}, "suffix", "suffix"),
        ({"template": "{{ .Prompt }}"}, "template", "template"),
        ({"context": [1, 2]}, "context", "/api/chat"),
        ({"raw": True, "system": "Be brief."}, "system", "put it into the prompt"),
    ],
    "embeddings": [
        *(
            ({"input": value}, "input", "input")
            for value in ("", [], [[]], ["a", 5], None, ["a"] * 2049)
        ),
        ({"stream": True}, "stream", "a stream of embeddings"),
        ({"dimensions": 0}, "dimensions", "from 1"),
        ({"encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"pooling": "cls"}, "pooling", "one of"),
        ({"normalize": False}, "normalize", "another length"),
    ],
    "rerank": [
        ({"query": ""}, "query", "1 to"),
        ({"query": {"image": "x"}}, "query", '{"text": ...}'),
        *(
            ({"documents": value}, "documents", "documents")
            for value in ([], "the fox", ["a", ""], [{"text": "a", "title": "b"}], ["a"] * 2048)
        ),
        ({"top_n": -1}, "top_n", "from 0"),
        ({"stream": True}, "stream", "a stream of scores"),
        ({"rank_fields": ["title"]}, "rank_fields", "several fields"),
        ({"max_tokens_per_doc": 8}, "max_tokens_per_doc", "end off"),
        ({"pooling": "cls"}, "pooling", "one of"),
    ],
}
TOOL_CALL = {"tool_choice": "required"}
PREPARED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat",
        {"tools": [function(parameters={"not": {}}, strict=True)], **TOOL_CALL},
        "tools",
        "uses not",
    ),
    (
        "chat",
        {"tools": [function(parameters={"x-guidance": 1})], **TOOL_CALL},
        "tools",
        "x-guidance",
    ),
    (
        "chat",
        {"tools": [function(parameters=CYCLE)], **TOOL_CALL},
        "tools",
        "tool f are refused: the JSON schema has a $ref that leads back to itself: #/$defs/a",
    ),
    (
        "chat",
        {
            "tools": [NOW],
            **TOOL_CALL,
            "response_format": {"type": "json_schema", "json_schema": STRICT_NOT},
        },
        "response_format",
        "uses not",
    ),
    (
        "completions",
        {"structured_outputs": {"json": {"not": {}}, "strict": True}},
        "structured_outputs",
        "uses not",
    ),
    (
        "completions",
        {"structured_outputs": {"regex": "(a"}},
        "structured_outputs",
        "unclosed group",
    ),
    ("completions", {"guided_grammar": "start: ("}, "guided_grammar", "Expected"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", **STRICT_NOT}}, "store": False},
        "text",
        "uses not",
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_a_body_that_cannot_be_answered_is_refused_by_name(name: str) -> None:
    for fields, param, words in CASES[name]:
        with pytest.raises(ApiError) as refused:
            read(name, **fields)
        error = refused.value
        assert (error.status, error.param) == (400, param), (fields, error.message)
        assert words in error.message, fields
        assert error.body(), "the answer can be encoded"


@pytest.mark.parametrize(("name", "fields", "param", "words"), PREPARED, ids=str)
def test_a_form_that_cannot_be_followed_is_refused_by_name(
    loaded: LoadedModel, name: str, fields: dict[str, Any], param: str, words: str
) -> None:
    request = read(name, **fields)
    assert request.has_form
    with pytest.raises(CadenzaError) as refused:
        request.prepare(loaded.text, OWN_TERMS)
    assert isinstance(refused.value, InvalidRequestError)
    assert request.param_of(refused.value.param) == param
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"\xff\xfe", "invalid_json", None),
        (b'{"prompt": "x", "n": ' + b"[" * 100_000, "invalid_json", None),
        (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json", None),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_value", "temperature"),
        (b'{"prompt": "x", "temperature": 1e400}', "invalid_value", "temperature"),
        (b'{"prompt": "x", "top_k": 9223372036854775808}', "invalid_value", "top_k"),
        (b'{"prompt": "x", "maxtokens": 1}', "unknown_field", "maxtokens"),
        (b'{"prompt": "x", "echo\\ud800": 1}', "unknown_field", r"echo\ud800"),
        (b'{"prompt": "x", "structured_outputs": {}}', "invalid_value", "structured_outputs"),
        (b'{"prompt": "\\ud800"}', "invalid_value", "prompt"),
        (b'{"prompt": []}', "invalid_value", "prompt"),
        (b'{"prompt": [[]]}', "invalid_value", "prompt"),
        (b'{"prompt": [1, "a"]}', "invalid_value", "prompt"),
        (b'{"prompt": ""}', "invalid_value", "prompt"),
        (b"{}", "invalid_value", "prompt"),
        (b'{"prompt": "x", "stream_options": {}}', "invalid_value", "stream_options"),
    ],
    ids=lambda each: repr(each)[:40],
)
def test_bytes_that_are_no_body_are_refused(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        GENERATING["completions"].read(body, ServerLimits())
    error = refused.value
    assert (error.status, error.code, error.param) == (400, code, param), error.message
    assert error.body(), "the answer can be encoded"


@pytest.mark.parametrize("name", CASES)
def test_each_endpoint_answers_a_400_in_the_shape_of_its_api(
    scripted: RunningServer, name: str
) -> None:
    fields, param, words = CASES[name][0]
    answer = scripted.post(PATHS[name], {**NEEDED[name], **fields})
    assert answer.status_code == 400, answer.text
    found = answer.json()
    if name.startswith("ollama"):
        assert found.keys() == {"error"}
        assert words in found["error"]
        return
    error = found["error"]
    assert words in error["message"]
    if name == "messages":
        assert (found["type"], error["type"]) == ("error", "invalid_request_error")
        assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    else:
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
