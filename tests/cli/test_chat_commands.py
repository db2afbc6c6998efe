"""What is typed in `cadenza chat`: which lines are commands, what they say, and a full context."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cadenza.cli.chat_commands import COMMANDS, ENDS, HELP, RETRY, obey
from cadenza.cli.conversation import Conversation
from cadenza.cli.interrupts import Interrupts
from cadenza.config import EngineConfig
from cadenza.errors import InvalidRequestError
from cadenza.frontend.loaded_model import LoadedModel, open_model

CONTEXT = 128
LIMITS = EngineConfig(
    max_num_seqs=1, max_model_len=CONTEXT, num_pages=16, max_num_batched_tokens=64
)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[LoadedModel]:
    with closing(open_model(str(model), LIMITS).load()) as loaded:
        yield loaded


@pytest.fixture
def talk(loaded: LoadedModel) -> Conversation:
    params = {"seed": 2, "max_tokens": None}
    return Conversation(loaded=loaded, params=params, interrupts=Interrupts())


def turns(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * len(texts), texts, strict=False)
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/systen be quick", "no command /systen (did you mean /system?)"),
        ("/nonsense", "no command /nonsense; /help lists them"),
        ("/", "no command /;"),
        ("/set temprature 0", "no 'temprature' (did you mean temperature?)"),
        ("/set temperature cold", "/set temperature 'cold': "),
        ("/set temperature -1", "temperature"),
        (
            "/set max_tokens many",
            "/set max_tokens 'many': 'many' is neither a whole number nor auto",
        ),
        ("/set ignore_eos maybe", "/set ignore_eos 'maybe': "),
        ("/set verbose maybe", "give on or off"),
        ("/set", "/set NAME VALUE: give a name, one of"),
    ],
)
def test_a_line_that_begins_like_a_command_is_no_message(talk: Conversation, line: str, said: str):
    before = talk.params
    with pytest.raises(InvalidRequestError) as caught:
        obey(talk, line)
    assert said in str(caught.value)
    assert talk.params == before


@pytest.mark.parametrize(
    "line", ["hello", "/etc/hosts is what?", "// a comment", "/* and */", " /systen one", ""]
)
def test_a_path_a_comment_and_a_blank_before_the_slash_are_messages(talk: Conversation, line: str):
    assert obey(talk, line) is None


def test_every_command_is_listed_by_help(talk: Conversation):
    assert obey(talk, "/help") == obey(talk, "/?") == HELP
    named = {*COMMANDS} - {"/help", "/?", "/quit"}
    assert [name for name in named if name not in HELP] == []
    assert {*ENDS, RETRY} < {*COMMANDS}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0", "temperature", 0.0),
        ("/set parameter top_k 7", "top_k", 7),
        ("/set num_predict 9", "max_tokens", 9),
        ("/set max_tokens auto", "max_tokens", None),
        ("/set repeat-penalty 1.5", "repetition_penalty", 1.5),
        ("/set stop The end.", "stop", ["The end."]),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set stop_token_ids 5,6", "stop_token_ids", (5, 6)),
    ],
)
def test_set_takes_what_the_flag_takes(talk: Conversation, line: str, name: str, value: object):
    assert f"{name} is set to" in str(obey(talk, line))
    assert talk.params == {"seed": 2, "max_tokens": None} | {name: value}
    assert value is None or f"{name} {value}" in str(obey(talk, "/show"))
    obey(talk, f"/set {name}")
    assert name not in talk.params


def test_a_form_of_the_answer_is_set_and_removed(talk: Conversation):
    obey(talk, "/set regex [ab]+")
    assert "structured" in talk.params
    obey(talk, "/set regex")
    assert "structured" not in talk.params


def test_show_tells_what_is_set_and_how_full_the_context_is(talk: Conversation):
    talk.turns = turns("the quick", "brown fox")
    obey(talk, "/set system be\x1b[31m quick")
    obey(talk, "/set verbose")
    shown = str(obey(talk, "/show"))
    assert f"{talk.num_tokens()} of {CONTEXT} tokens, 1 question answered" in shown
    assert 0 < talk.num_tokens() < CONTEXT
    assert "be\N{REPLACEMENT CHARACTER}[31m quick" in shown
    assert "verbose    on" in shown


def test_the_fewest_of_the_oldest_questions_go_that_leave_room_for_an_answer(talk: Conversation):
    assert talk.num_too_many("the") == 0
    talk.turns = turns(*["one two three four five six seven"] * 40)
    count = talk.num_too_many("the")
    assert 0 < count < 20
    before = [*talk.turns]
    talk.drop_oldest(count)
    assert talk.turns == before[2 * count :]
    assert talk.num_too_many("the") == 0
    assert CONTEXT - talk.num_tokens() >= CONTEXT // 4
    talk.turns = before[2 * (count - 1) :]
    assert talk.num_too_many("the") == 1


def test_nothing_goes_for_a_message_that_does_not_fit_alone(talk: Conversation):
    talk.turns = turns("one", "two")
    assert talk.num_too_many("seven " * CONTEXT * 2) == 0


def test_a_question_after_dropped_ones_is_taken_back_alone(talk: Conversation):
    obey(talk, "/set max_tokens 2")
    obey(talk, "/set ignore_eos on")
    talk.turns = turns("one", "two", "three", "four")
    talk.drop_oldest(1)
    talk.ask("five", lambda _: None)
    assert [each["content"] for each in talk.turns[:3]] == ["three", "four", "five"]
    assert talk.take_back() == "five"
    assert talk.turns == turns("three", "four")
