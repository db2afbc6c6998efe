"""What is typed in `cadenza chat`: which lines are commands, what they say, and a full context."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from cadenza.cli.conversation import COMMANDS, ENDS, HELP, RETRY, Asked, Conversation, obey
from cadenza.cli.interrupts import Interrupts
from cadenza.config import EngineConfig
from cadenza.errors import InvalidRequestError
from cadenza.frontend.loaded_model import LoadedModel, open_model
from cadenza.media.opening import PooledPixels
from tests.faces.seeing import seeing_text

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
    assert talk.num_too_many(Asked("the")) == 0
    talk.turns = turns(*["one two three four five six seven"] * 40)
    count = talk.num_too_many(Asked("the"))
    assert 0 < count < 20
    before = [*talk.turns]
    talk.drop_oldest(count)
    assert talk.turns == before[2 * count :]
    assert talk.num_too_many(Asked("the")) == 0
    assert CONTEXT - talk.num_tokens() >= CONTEXT // 4
    talk.turns = before[2 * (count - 1) :]
    assert talk.num_too_many(Asked("the")) == 1


def test_nothing_goes_for_a_message_that_does_not_fit_alone(talk: Conversation):
    talk.turns = turns("one", "two")
    assert talk.num_too_many(Asked("seven " * CONTEXT * 2)) == 0


def test_a_question_after_dropped_ones_is_taken_back_alone(talk: Conversation):
    obey(talk, "/set max_tokens 2")
    obey(talk, "/set ignore_eos on")
    talk.turns = turns("one", "two", "three", "four")
    talk.drop_oldest(1)
    talk.ask(Asked("five"), lambda _: None)
    assert [each["content"] for each in talk.turns[:3]] == ["three", "four", "five"]
    assert talk.take_back() == Asked("five")
    assert talk.turns == turns("three", "four")


@pytest.fixture
def seeing(talk: Conversation) -> Conversation:
    """Whose front end sees, before any engine computes."""
    text = seeing_text(pixels=PooledPixels(), max_model_len=CONTEXT)
    talk.loaded = replace(talk.loaded, text=text)
    return talk


def drawn(file: Path, width: int, height: int) -> Path:
    Image.new("RGB", (width, height)).save(file)
    return file


def test_an_image_is_told_with_its_size_and_tokens_and_goes_with_the_next_message(
    seeing: Conversation, tmp_path: Path
):
    one, two = drawn(tmp_path / "a b.png", 30, 20), drawn(tmp_path / "c.jpg", 10, 10)
    said = obey(seeing, f"/image {one}")
    assert said == "a b.png: 30 x 20 pixels, 6 tokens; it goes with the next message."
    assert obey(seeing, f"/image {two} '{one}'") == (
        "c.jpg: 10 x 10 pixels, 1 token; it goes with the next message.\n"
        "a b.png: 30 x 20 pixels, 6 tokens; it goes with the next message."
    )
    assert "images     3 for the next message" in str(obey(seeing, "/show"))
    asked = seeing.question("which?")
    kinds = [part["type"] for part in asked.content if isinstance(part, dict)]
    assert kinds == ["image"] * 3 + ["text"]
    assert seeing.num_too_many(asked) == 0


def test_images_are_gone_after_their_turn_and_are_asked_with_again(
    seeing: Conversation, tmp_path: Path
):
    obey(seeing, f"/image {drawn(tmp_path / 'a.png', 30, 20)}")
    asked = seeing.question("what? " * CONTEXT)
    with pytest.raises(InvalidRequestError, match="context"):
        seeing.ask(asked, lambda _: None)
    assert seeing.images == ()
    assert seeing.take_back() == asked
    assert seeing.question("the") == Asked("the")
    assert Asked("the").content == "the"


def test_images_can_be_dropped(seeing: Conversation, tmp_path: Path):
    file = drawn(tmp_path / "a.png", 30, 20)
    obey(seeing, f"/image {file}")
    assert obey(seeing, "/image") == "The next message has no image (dropped: 1 image)."
    assert seeing.images == ()
    obey(seeing, f"/image {file}")
    obey(seeing, "/reset")
    assert seeing.images == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.png", "cannot be read: No such file"),
        ("text.png", r"image 2 \(text.png\): its bytes are of no known format"),
        ("flat.png", r"image 2 \(flat.png\): it has 300 x 10 pixels, which is too flat"),
        (".", "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_is_no_image_is_refused_and_not_attached(
    seeing: Conversation, tmp_path: Path, name: str, said: str
):
    (tmp_path / "text.png").write_text("no image")
    drawn(tmp_path / "flat.png", 300, 10)
    obey(seeing, f"/image {drawn(tmp_path / 'a.png', 30, 20)}")
    with pytest.raises(InvalidRequestError, match=said):
        obey(seeing, f"/image {tmp_path / name}")
    assert len(seeing.images) == 1


def test_a_model_that_does_not_see_says_so_when_an_image_is_attached(
    talk: Conversation, tmp_path: Path
):
    with pytest.raises(InvalidRequestError, match="takes no images"):
        obey(talk, f"/image {drawn(tmp_path / 'a.png', 30, 20)}")
