"""Thinking within a bound: the token that ends it is forced, in every API, over any grammar."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import InvalidRequestError
from cadenza.frontend.answers import AnswerParsers, AskedAnswer
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.prepared_request import OWN_TERMS, ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.calls.conversation import AskedConversation
from cadenza.server.errors import ApiError
from cadenza.server.fields.thinking import EFFORTS, AskedThinking
from cadenza.server.limits import ServerLimits
from cadenza.structured import ConstraintSpec, ThinkingBound
from cadenza.text.constraints.call_constraint import ThinkingConstraint
from tests.cli.harness import write_model
from tests.server.bodies import GENERATING
from tests.server.dialects import body_of, post, told
from tests.server.harness import RunningServer, WatchedService, running_server
from tests.server.scripted_engine import ScriptedEngine

BEGIN, END = 311, 312
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}],
    "max_tokens": 24,
    "temperature": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model with random weights, whose prompts begin thinking."""
    folder = write_thinker(tmp_path_factory.mktemp("models") / "thinker", TEMPLATE)
    config = EngineConfig(max_num_seqs=4, max_model_len=2048, max_num_batched_tokens=64)
    loaded = load_model(str(folder), config)
    yield loaded
    loaded.close()


def write_thinker(path: Path, template: str) -> Path:
    folder: Path = write_model(path)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    like = described["added_tokens"][0]
    described["added_tokens"] += [
        {**like, "id": token_id, "content": content}
        for token_id, content in ((BEGIN, "<think>"), (END, "</think>"))
    ]
    file.write_text(json.dumps(described))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def server(thinker: LoadedModel) -> Iterator[RunningServer]:
    engine = WatchedService(thinker.core, thinker.fingerprint)
    with running_server(engine, thinker.text) as running:
        yield running


def ids_of(server: RunningServer, **fields: Any) -> list[int]:
    answer = server.post(CHAT, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_thinking_ends_at_its_bound_and_not_before(server: RunningServer) -> None:
    seed = 1
    free = ids_of(server, seed=seed, logit_bias={str(END): -100})
    bound = ids_of(server, seed=seed, logit_bias={str(END): -100}, thinking_token_budget=5)
    assert END not in free
    assert bound[:5] == free[:5], "thinking within the bound is as without it"
    assert bound.index(END) == 5
    assert len(bound) == 24, "the answer goes on"
    unbound = ids_of(server, seed=seed, logit_bias={str(END): -100}, thinking_token_budget=-1)
    assert unbound == free
    none = ids_of(server, seed=seed, thinking_token_budget=0)
    assert none[0] == END


def test_thinking_that_ends_before_its_bound_is_left_alone(server: RunningServer) -> None:
    own = {"logit_bias": {str(END): 100}, "seed": 1}
    assert ids_of(server, **own)[0] == END
    assert ids_of(server, **own, thinking_token_budget=5) == ids_of(server, **own)


def test_an_answer_has_its_form_behind_bounded_thinking(server: RunningServer) -> None:
    fields = {"guided_regex": "[0-9]{3}", "thinking_token_budget": 4, "seed": 2, "max_tokens": 60}
    answer = server.post(CHAT, {**BODY, **fields, "ignore_eos": False}).json()
    message = answer["choices"][0]["message"]
    ids = answer["choices"][0]["token_ids"]
    assert 4 <= ids.index(END) <= 8, "a character that is begun is completed"
    assert len(message["content"]) == 3
    assert message["content"].isdigit()


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("responses", {"thinking_token_budget": 5}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
def test_a_bound_is_the_same_in_every_api(
    server: RunningServer, name: str, bound: dict[str, Any]
) -> None:
    common = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logit_bias": {str(END): -100}}
    answer = post(server, name, body_of(name, BODY["messages"], 24, **common, **bound))
    chat = server.post(CHAT, {**BODY, **common, "thinking_token_budget": 5}).json()
    assert told(name, answer) == told("chat", chat)
    details = "output_tokens_details"
    spent = {"reasoning_tokens": 5} if name == "responses" else {"thinking_tokens": 5}
    assert answer["usage"][details] == spent
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_turns_thinking_off_or_bounds_it(thinker: LoadedModel, effort: str) -> None:
    asked = AskedConversation(
        messages=BODY["messages"],
        use=None,
        thinking=AskedThinking(effort=effort),
        template_kwargs={},
    )
    request = thinker.text.prepare(asked.prompt(thinker.text), SamplingParams()).request
    has_ended = request.prompt_token_ids[-1] == END
    assert has_ended == (effort == "none")
    most = EFFORTS[effort]
    bound = None if most is None else ThinkingBound(begin=None, end=END, max_tokens=most)
    spec = None if bound is None else ConstraintSpec(thinking=bound)
    assert request.constraint == spec


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": BODY["messages"], "verbosity": "low"}),
        ("/v1/responses", {"input": "the fox", "text": {"verbosity": "low"}}),
    ],
)
def test_a_verbosity_is_told_to_a_template_that_reads_it_and_else_changes_nothing(
    tmp_path: Path, script: tuple[int, ...], text: TextFrontend, path: str, asked: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "verbose")
    file = folder / "tokenizer_config.json"
    template = "{{ messages[0].content }}{% if verbosity is defined %} {{ verbosity }}{% endif %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    reader = TextFrontend(open_checkpoint(folder))
    unsaid = {name: value for name, value in asked.items() if name not in ("verbosity", "text")}
    told: list[str] = []
    for front_end, body in ((reader, asked), (reader, unsaid), (text, asked), (text, unsaid)):
        engine = ScriptedEngine(script)
        with running_server(engine, front_end) as server:
            answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        told.append(front_end.decode(engine.submitted[-1].prompt_token_ids))
    assert told[:2] == ["the fox low", "the fox"]
    assert told[2] == told[3]


@pytest.mark.parametrize(
    ("path", "asked", "is_off", "most"),
    [
        (CHAT, {"enable_thinking": False}, True, None),
        (CHAT, {"enable_thinking": True}, False, None),
        (CHAT, {"think": False}, True, None),
        (CHAT, {"think": "low"}, False, 1024),
        (CHAT, {"thinking": {"type": "disabled"}}, True, None),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, False, 9),
        (CHAT, {"reasoning": {"effort": "none"}}, True, None),
        (CHAT, {"reasoning": {"effort": "minimal"}}, False, 256),
        (CHAT, {"reasoning": {"enabled": False}}, True, None),
        (CHAT, {"reasoning": {"max_tokens": 7, "exclude": False}}, False, 7),
        (CHAT, {"reasoning": "off"}, True, None),
        (CHAT, {"thinking_budget": 7}, False, 7),
        (CHAT, {"extra_body": {"enable_thinking": False}}, True, None),
        (CHAT, {"think": False, "reasoning_effort": "high"}, True, None),
        (CHAT, {"think": False, "chat_template_kwargs": {"enable_thinking": True}}, False, None),
        ("/v1/responses", {"enable_thinking": False}, True, None),
        ("/v1/responses", {"reasoning": {"enabled": False}}, True, None),
        ("/v1/responses", {"reasoning_effort": "none"}, True, None),
        ("/v1/responses", {"thinking": {"type": "disabled"}}, True, None),
        ("/v1/messages", {"enable_thinking": True}, False, None),
        ("/v1/messages", {"think": True}, False, None),
        ("/v1/messages", {"thinking": {"type": "enabled"}, "think": True}, False, None),
        ("/v1/messages", {"reasoning_effort": "minimal"}, False, 256),
        ("/v1/messages", {}, True, None),
    ],
    ids=str,
)
def test_a_switch_of_another_server_is_the_switch_here(
    thinker: LoadedModel, path: str, asked: dict[str, Any], is_off: bool, most: int | None
) -> None:
    needed = {"input": "the fox"} if path == "/v1/responses" else {"messages": BODY["messages"]}
    needed |= {"max_tokens": 9} if path == "/v1/messages" else {}
    endpoint = next(each for each in GENERATING.values() if each.route.path == path)
    request = endpoint.read(
        json.dumps({**needed, **asked, "store": False}).encode(), ServerLimits()
    )
    (prepared,) = request.prepare(thinker.text, OWN_TERMS)
    assert (prepared.request.prompt_token_ids[-1] == END) == is_off
    constraint = prepared.request.constraint
    bound = None if constraint is None else constraint.thinking
    assert (None if bound is None else bound.max_tokens) == most


def test_a_variable_that_the_template_does_not_read_is_ignored_and_logged_once(
    thinker: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def told(path: str = CHAT, **variables: Any) -> tuple[int, ...]:
        endpoint = next(each for each in GENERATING.values() if each.route.path == path)
        given = {"messages": BODY["messages"], "chat_template_kwargs": variables}
        request = endpoint.read(json.dumps(given).encode(), ServerLimits())
        (prepared,) = request.prepare(thinker.text, OWN_TERMS)
        return prepared.request.prompt_token_ids

    with caplog.at_level(logging.INFO):
        odd = told(of_tomorrow={"a": [1]}, thinking=True, raise_exception="x", bos_token="y")
        assert odd == told(of_tomorrow=5) == told()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("of_tomorrow" in line for line in lines) == 1
    assert told(enable_thinking=False) != odd
    with pytest.raises(InvalidRequestError, match="must be a string") as refused:
        told(enable_thinking=[1])
    assert refused.value.param == "chat_template_kwargs"
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ApiError, match="is a field of the request"):
            told(**{name: True})


def test_a_bound_needs_marks_that_are_tokens(scripted: RunningServer, text: TextFrontend) -> None:
    body = {"messages": BODY["messages"], "max_tokens": 5, "thinking_token_budget": 5}
    assert scripted.post(CHAT, body).status_code == 200, "what does not think is within any bound"
    plain = TextFrontend(open_checkpoint(None), parsers=AnswerParsers(reasoning="granite"))
    with pytest.raises(InvalidRequestError, match="marks that are tokens") as refused:
        plain.prepare(
            ChatPrompt(messages=BODY["messages"], asked=AskedAnswer(max_thinking=5)),
            SamplingParams(),
        )
    assert refused.value.param == "thinking_token_budget"


@pytest.mark.parametrize("asked", [{"effort": "none"}, {"is_on": False}], ids=["effort", "switch"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_thinking_that_is_off_without_a_switch_has_a_bound_of_0(
    tmp_path: Path, asked: dict[str, Any], has_begun: bool
) -> None:
    """As of models that always think; else it went on, and the content was empty."""
    template = TEMPLATE.partition("{% if enable_thinking")[0] + "{# </think> #}{% endif %}"
    if not has_begun:
        template = template.replace("<think>", "{# <think> #}")
    text = TextFrontend(open_checkpoint(write_thinker(tmp_path / "thinker", template)))
    conversation = AskedConversation(
        messages=BODY["messages"], use=None, thinking=AskedThinking(**asked)
    )
    request = text.prepare(conversation.prompt(text), SamplingParams()).request
    begin = None if has_begun else BEGIN
    bound = ThinkingBound(begin=begin, end=END, max_tokens=0)
    assert request.constraint == ConstraintSpec(thinking=bound)
    free = AskedConversation(messages=BODY["messages"], use=None)
    assert text.prepare(free.prompt(text), SamplingParams()).request.constraint is None


def test_thinking_that_is_off_leaves_a_model_alone_whose_marks_are_no_tokens() -> None:
    plain = TextFrontend(open_checkpoint(None), parsers=AnswerParsers(reasoning="granite"))
    asked = AskedConversation(
        messages=BODY["messages"], use=None, thinking=AskedThinking(is_on=False)
    )
    assert plain.prepare(asked.prompt(plain), SamplingParams()).request.constraint is None


def test_a_bound_follows_from_the_tokens_alone() -> None:
    bound = ThinkingBound(begin=7, end=9, max_tokens=2)
    everything, only_end = b"\xff" * 8, (1 << 9).to_bytes(8, "little")

    def allowed_after(tokens: list[int]) -> bytes:
        constraint = ThinkingConstraint(bound, 40, None)
        for token_id in tokens:
            constraint.accept(token_id)
        assert not constraint.has_failed
        assert not constraint.is_complete
        return constraint.allowed()

    for free in ([], [1], [7], [7, 1], [1, 1, 7, 1], [7, 9, 1, 1, 1], [7, 1, 2, 9, 3]):
        assert allowed_after(free) == everything, free
    for forced in ([7, 1, 2], [1, 7, 1, 2], [7, 7, 7]):
        assert allowed_after(forced) == only_end, forced
