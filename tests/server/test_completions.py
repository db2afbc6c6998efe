"""The fields of completions and chats, held by a scripted engine and by the bundled model;
predictions, and characters that are cut."""

from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.text.tokens.decoder_stages import BYTE_OF_CHARACTER
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

CHAT = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(params=["scripted", "bundled"])
def server(request: pytest.FixtureRequest) -> RunningServer:
    return request.getfixturevalue(request.param)


def joined(events: list[Any], index: int, path: tuple[str, ...]) -> str:
    """A choice's deltas put together."""
    parts: list[str] = []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                found = choice["delta"] if path[0] == "delta" else choice
                parts.append(found.get(path[-1], ""))
    return "".join(parts)


def finish_reasons(events: list[Any], index: int) -> list[str]:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    found = [choice["finish_reason"] for choice in choices if choice["index"] == index]
    return [reason for reason in found if reason is not None]


def test_a_completion_has_the_fields_of_its_kind(server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "the fox", "max_tokens": 5, "seed": 1})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
    (choice,) = body["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_several_prompts_are_answered_in_their_order(server: RunningServer) -> None:
    prompts = ["one two", "the lazy dog", "three"]
    settings = {"max_tokens": 6, "temperature": 0.0}
    alone = [
        server.post("/v1/completions", {"prompt": prompt, **settings}).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    body = {"prompt": prompts, **settings}
    whole = server.post("/v1/completions", body).json()
    assert [choice["text"] for choice in whole["choices"]] == alone
    events = server.events("/v1/completions", {**body, "stream": True})
    assert [joined(events, index, ("text",)) for index in range(3)] == alone


def test_token_ids_are_prompts_too(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "the fox"}).json()["tokens"]
    settings = {"max_tokens": 6, "temperature": 0.0, "return_token_ids": True}
    found = [
        server.post("/v1/completions", {"prompt": prompt, **settings}).json()["choices"][0]
        for prompt in ("the fox", ids, [ids])
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["prompt_token_ids"] == ids


def test_usage_comes_last_when_asked_for(server: RunningServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "stream": True, "ignore_eos": True}
    events = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *parts, last, done = events
    assert done == "[DONE]"
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert "usage" not in server.events("/v1/completions", body)[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_alone_asks_for_none(server: RunningServer, path: str) -> None:
    asked = {"prompt": "the fox"} if path == "/v1/completions" else {"messages": CHAT}
    for options in ({"continuous_usage_stats": True}, {"include_usage": False}):
        body = {**asked, "max_tokens": 5, "stream": True, "stream_options": options}
        events = server.events(path, body)[:-1]
        assert not [event for event in events if "usage" in event]
        assert all(event["choices"] for event in events)


def test_usage_is_in_each_frame_when_asked_for(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "the fox", "max_tokens": 5, "stream": True, "stream_options": options}
    *parts, last, _ = server.events("/v1/completions", body)
    counts = [part["usage"]["completion_tokens"] for part in [*parts, last]]
    assert counts == sorted(counts)
    assert counts[-1] <= 5


def test_logprobs_of_a_completion_have_four_lists_of_one_length(server: RunningServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "logprobs": 3, "ignore_eos": True, "seed": 3}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in found} == {5}
    assert all(3 <= len(top) <= 4 for top in found["top_logprobs"])
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
    streamed = server.events("/v1/completions", {**body, "stream": True})[:-1]
    parts = [choice["logprobs"] for event in streamed for choice in event["choices"]]
    for name in found:
        assert [item for part in parts for item in part[name]] == found[name]


def test_logprobs_of_a_chat_answer_are_objects(server: RunningServer) -> None:
    body = {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "seed": 3}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert content
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    streamed = server.events("/v1/chat/completions", {**body, "stream": True})[1:-1]
    parts = [choice["logprobs"]["content"] for event in streamed for choice in event["choices"]]
    assert [entry for part in parts for entry in part] == content


def test_what_is_told_of_a_prompt_is_null_unless_it_was_asked_for(server: RunningServer) -> None:
    names = ("prompt_logprobs", "prompt_token_ids")
    chat = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}).json()
    assert [chat[name] for name in names] == [None, None]
    assert not set(names) & set(chat["choices"][0])
    assert chat["choices"][0]["token_ids"] is None
    (choice,) = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).json()["choices"]
    assert [choice[name] for name in (*names, "token_ids")] == [None] * 3


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_chat_answer_tells_of_its_prompt_once_beside_its_choices(
    server: RunningServer, max_tokens: int
) -> None:
    body = {"messages": CHAT, "max_tokens": max_tokens, "n": 2, "ignore_eos": True}
    body |= {"prompt_logprobs": 1, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()
    ids = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert whole["prompt_token_ids"] == ids
    first, *rest = whole["prompt_logprobs"]
    assert first is None
    assert all(str(token_id) in entry for token_id, entry in zip(ids[1:], rest, strict=True))
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [max_tokens] * 2
    events = server.events("/v1/chat/completions", {**body, "stream": True})[:-1]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [event[name] for event in events if event[name] is not None] == [whole[name]]
    ends = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert ends == ["length"] * 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_no_tokens_and_an_echo_are_the_prompts_log_probabilities(
    server: RunningServer, is_stream: bool
) -> None:
    """What evaluation harnesses score texts with."""
    ids = server.post("/tokenize", {"prompt": "the quick fox"}).json()["tokens"]
    body = {"prompt": "the quick fox", "max_tokens": 0, "echo": True, "logprobs": 1}
    body |= {"temperature": 0.0, "return_tokens_as_token_ids": True}
    one = server.post("/v1/completions", {**body, "max_tokens": 1, "ignore_eos": True}).json()
    if is_stream:
        options = {"include_usage": True}
        body |= {"stream": True, "stream_options": options}
        *parts, last = server.events("/v1/completions", body)[:-1]
        (choice,) = [choice for part in parts for choice in part["choices"]]
        usage = last["usage"]
    else:
        answer = server.post("/v1/completions", body).json()
        (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("the quick fox", "length")
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] == len(ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    for name, found in choice["logprobs"].items():
        assert found == one["choices"][0]["logprobs"][name][: len(ids)]


def test_log_probabilities_name_tokens_by_their_ids_when_asked_to(server: RunningServer) -> None:
    asked = {"max_tokens": 4, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    by_ids = {**asked, "return_tokens_as_token_ids": True}
    body = {"prompt": "the fox", "logprobs": 2}
    (text,), (ids,) = (
        server.post("/v1/completions", {**body, **more}).json()["choices"]
        for more in (asked, by_ids)
    )
    names = [f"token_id:{token_id}" for token_id in ids["token_ids"]]
    assert ids["logprobs"]["tokens"] == names
    for name, top in zip(names, ids["logprobs"]["top_logprobs"], strict=True):
        assert name in top
        assert all(key.removeprefix("token_id:").isdigit() for key in top)
    for name in ("text_offset", "token_logprobs"):
        assert ids["logprobs"][name] == text["logprobs"][name]
    chat = {"messages": CHAT, "logprobs": True, "top_logprobs": 1, **by_ids}
    (choice,) = server.post("/v1/chat/completions", chat).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for e in content for top in e["top_logprobs"])


def test_echo_begins_with_the_prompt(server: RunningServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "temperature": 0.0}
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    echoed = {**body, "echo": True}
    assert server.post("/v1/completions", echoed).json()["choices"][0]["text"] == "the fox" + plain
    events = server.events("/v1/completions", {**echoed, "stream": True})
    assert joined(events, 0, ("text",)) == "the fox" + plain


def test_tokenize_and_detokenize_are_each_others_reverse(server: RunningServer) -> None:
    tokenized = server.post("/tokenize", {"prompt": "the lazy dog", "return_token_strs": True})
    found = tokenized.json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert "".join(found["token_strs"]) == "the lazy dog".replace(" ", "\u0120")
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == "the lazy dog"


def test_tokenize_renders_messages_as_chat_does(server: RunningServer) -> None:
    count = server.post("/tokenize", {"messages": CHAT}).json()["count"]
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == count


ENDING = {"role": "assistant", "content": "It is the <|im_end|><|end|> colour  "}


def test_a_continued_message_is_the_prompts_end(server: RunningServer) -> None:
    """Whatever control tokens its text spells, it is text: as many of them as without it."""

    def tokens(last: dict[str, str], **options: bool) -> list[int]:
        answer = server.post("/tokenize", {"messages": [*CHAT, last], **options})
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    closed = {"add_generation_prompt": False}
    continued = tokens(ENDING, continue_final_message=True)
    assert continued == tokens(ENDING, continue_final_message=True, **closed)
    text = server.post("/detokenize", {"tokens": continued}).json()["prompt"]
    assert text.rstrip().endswith("It is the <|im_end|><|end|> colour")
    whole = tokens(ENDING, **closed)
    assert len(continued) < len(whole) < len(tokens(ENDING))
    info = server.get("/tokenizer_info").json()
    harmless = tokens({**ENDING, "content": "It is the colour"}, continue_final_message=True)
    assert continued.count(info["eos_token_id"]) == harmless.count(info["eos_token_id"])
    body = {"messages": [*CHAT, ENDING], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    chat = server.post("/v1/chat/completions", {**body, "continue_final_message": True}).json()
    assert chat["usage"]["prompt_tokens"] == len(continued)
    plain = {**body, "prompt": continued}
    del plain["messages"]
    (choice,) = server.post("/v1/completions", plain).json()["choices"]
    assert chat["choices"][0]["message"]["content"] == choice["text"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_prompt_ends_in_one_way_only(server: RunningServer, path: str) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = server.post(path, {"messages": [*CHAT, ENDING], **both})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "continue_final_message")


def test_without_a_generation_prompt_a_chat_prompt_ends_with_its_last_message(
    server: RunningServer,
) -> None:
    body = {"messages": CHAT, "max_tokens": 1}
    counts = [
        server.post("/v1/chat/completions", {**body, **more}).json()["usage"]["prompt_tokens"]
        for more in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False})
    ]
    assert counts[0] == counts[1] > counts[2]


def test_what_is_about_a_template_goes_with_messages(server: RunningServer) -> None:
    asking = {
        "add_generation_prompt": (True, False),
        "continue_final_message": (False, True),
        "chat_template_kwargs": ({}, {"enable_thinking": True}),
    }
    for name, (nothing, something) in asking.items():
        assert server.post("/tokenize", {"prompt": "a", name: nothing}).status_code == 200
        refused = server.post("/tokenize", {"prompt": "a", name: something})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_the_tokenizer_is_described_as_remote_tokenizers_read_it(server: RunningServer) -> None:
    info = server.get("/tokenizer_info").json()
    assert {"tokenizer_class", "bos_token", "eos_token", "pad_token", "chat_template"} <= set(info)
    assert "message" in info["chat_template"]
    pieces = server.post("/detokenize", {"tokens": [info["eos_token_id"]]}).json()["prompt"]
    assert pieces == info["eos_token"]


CHAT_PATH = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 0,
}


def told(server: RunningServer, **fields: Any) -> tuple[str, int, int]:
    """The content, and the drafts that were accepted and rejected."""
    answer = server.post(CHAT_PATH, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["completion_tokens_details"]
    content = found["choices"][0]["message"]["content"]
    return content, details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def test_a_right_prediction_is_accepted_and_changes_nothing(bundled: RunningServer) -> None:
    content, accepted, rejected = told(bundled)
    assert accepted == rejected == 0
    for given in (content, [{"type": "text", "text": content}]):
        same, accepted, _ = told(bundled, **predicted(given))
        assert same == content
        assert accepted >= 8
    assert told(bundled, speculative=False, **predicted(content)) == (content, 0, 0)


def test_the_usage_of_a_stream_counts_drafts(bundled: RunningServer) -> None:
    content, _, _ = told(bundled)
    body = {
        **ASKED,
        **predicted(content),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = bundled.events(CHAT_PATH, body)
    usage = events[-2]["usage"]
    assert 8 <= usage["completion_tokens_details"]["accepted_prediction_tokens"] < 24


def test_a_wrong_prediction_changes_nothing(bundled: RunningServer) -> None:
    content, _, _ = told(bundled)
    words = content.split()
    wrong = " ".join(
        word for pair in zip(words, words[2:] + words[:2], strict=True) for word in pair
    )
    assert told(bundled, **predicted(wrong))[0] == content
    assert told(bundled, **predicted(""))[0] == content
    assert (
        told(bundled, temperature=1.2, seed=3, **predicted(wrong))[0]
        == told(bundled, temperature=1.2, seed=3)[0]
    )


def test_a_prediction_beyond_the_context_is_refused_by_name(bundled: RunningServer) -> None:
    answer = bundled.post(CHAT_PATH, {**ASKED, **predicted("far too long " * 4000)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


@pytest.mark.parametrize("speculative", [True, {"num_speculative_tokens": 2}])
def test_a_request_may_ask_for_drafts(bundled: RunningServer, speculative: Any) -> None:
    fields = {"repetition_penalty": 0.5, "max_tokens": 60}
    plain, accepted, _ = told(bundled, **fields)
    assert accepted == 0
    same, accepted, _ = told(bundled, speculative=speculative, **fields)
    assert same == plain
    assert accepted > 0


CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@pytest.mark.parametrize(("max_tokens", "shown"), [(6, "é🙂"), (5, "é"), (3, "é"), (1, "")])
def test_a_character_that_is_cut_is_left_out_and_its_bytes_are_told(
    max_tokens: int, shown: str
) -> None:
    text = TextFrontend(open_checkpoint(None))
    assert text.tokenizer is not None
    data = "é🙂".encode()
    script = [text.tokenizer.id_of(CHARACTERS[byte]) for byte in data]
    engine = ScriptedEngine(
        [each for each in script if each is not None], vocab_size=text.tokenizer.vocab_size
    )
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    with running_server(engine, text) as server:
        answer = server.post("/v1/chat/completions", {**body, "max_tokens": max_tokens}).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "length")
    entries = choice["logprobs"]["content"]
    assert [byte for entry in entries for byte in entry["bytes"]] == [*data[:max_tokens]]
