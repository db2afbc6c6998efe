"""Stop strings act in an answer's content only."""

import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.events import Finished
from cadenza.frontend.sample_output import ContentStops, SampleOutput
from cadenza.text.answers.json_calls import GENERIC
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartParser, PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.tokens.stop import StopMatcher
from tests.text.parts import Joined, joined, parse

THINK = REASONING_FORMATS["think"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP\\n"}}\n</tool_call>'
CALLED = ("tool_call", "f", '{"a": "STOP\\n"}')


def stops_of(plan: PartPlan, stops: list[str], *, is_included: bool = False) -> ContentStops:
    make = partial(StopMatcher, stops, is_included=is_included)
    return ContentStops(PartParser(plan), stops, make)


def read(parser: ContentStops, *pieces: str) -> tuple[str, Joined]:
    """The text that is shown, and its parts."""
    shown = [*map(parser.push, pieces), parser.flush()]
    return "".join(each.text for each in shown), joined([p for each in shown for p in each.parts])


def expected(plan: PartPlan, stops: list[str], text: str) -> Joined:
    """The parts of the whole text, cut at the first stop string in a stretch of content."""
    found: Joined = []
    for kind, name, piece in parse(plan, text):
        matcher = StopMatcher(stops)
        cut = matcher.push(piece) + matcher.flush() if kind == "content" else piece
        if cut or name is not None:
            found.append((kind, name, cut))
        if matcher.match is not None:
            break
    return found


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        (
            "<think>a\nb</think>\n\nso\nit",
            "\n",
            [("reasoning", None, "a\nb"), ("content", None, "so")],
        ),
        ("<think>STOP</think>STOP it", "STOP", [("reasoning", None, "STOP")]),
        (f"I look.\n{CALL}\nSTOP it", "STOP", [("content", None, "I look."), CALLED]),
        (CALL, "\n", [CALLED]),
        (f"ST{CALL}OP", "STOP", [("content", None, "ST"), CALLED, ("content", None, "OP")]),
        (
            "<think>a</think><tool_call>no STOP",
            "STOP",
            [("reasoning", None, "a"), ("content", None, "<tool_call>no ")],
        ),
    ],
)
def test_a_stop_string_acts_in_content_only(text: str, stop: str, shown: Joined) -> None:
    plan = PartPlan(reasoning=THINK, tools=TOOL_FORMATS["hermes"])
    assert read(stops_of(plan, [stop]), text)[1] == shown
    assert read(stops_of(plan, [stop]), *text)[1] == shown


def test_the_stop_string_may_be_kept() -> None:
    plan = PartPlan(reasoning=THINK)
    text = "<think>END</think>so END it"
    parser = stops_of(plan, ["END"], is_included=True)
    assert read(parser, *text) == (
        "<think>END</think>so END",
        [("reasoning", None, "END"), ("content", None, "so END")],
    )
    assert parser.match is not None
    assert parser.match.end == len("<think>END</think>so END")


PIECES = [
    *("<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"),
    *("a", "b", "ab", "\n", " ", "<", "{"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
PLANS = [
    PartPlan(reasoning=reasoning, begins_in_reasoning=begins, tools=tools)
    for reasoning, begins in ((None, False), (THINK, False), (THINK, True))
    for tools in (None, TOOL_FORMATS["hermes"], GENERIC)
]
STOPS = st.lists(
    st.sampled_from(["a", "ab", "b", "\n", "ba", "<to", "a\n\n", "{"]), min_size=1, max_size=3
)


@given(st.sampled_from(PLANS), TEXTS, STOPS, st.data())
def test_any_answer_is_cut_at_the_same_place_however_it_comes(
    plan: PartPlan, text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = stops_of(plan, stops)
    shown, parts = read(whole, text)
    assert parts == expected(plan, stops, text)
    assert text.startswith(shown)
    assert (shown == text) or whole.match is not None
    for others in (pieces, [*text]):
        parser = stops_of(plan, stops)
        assert read(parser, *others) == (shown, parts)
        assert parser.match == whole.match


class Pieces:
    """A detokenizer whose token `i` is the `i`-th piece."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def drop_incomplete(self) -> None: ...

    def flush(self) -> str:
        return ""


def sample_of(pieces: tuple[str, ...], stop: str, **options: Any) -> SampleOutput:
    detokenizer: Any = Pieces(*pieces)
    stops = stops_of(PartPlan(reasoning=THINK, begins_in_reasoning=True), [stop])
    return SampleOutput(0, detokenizer, parser=stops, **options)


def test_tokens_behind_a_stop_string_in_content_are_not_shown() -> None:
    pieces = ("a\n", "b</think>", "\n", "so", " it", "\nx", "y")
    output = sample_of(pieces, "\n")
    ended = [output.push(token_id, None) for token_id in range(6)]
    assert ended == [False] * 5 + [True]
    told = output.output()
    assert (told.finish_reason, told.stop_reason) == ("stop", "\n")
    assert told.token_ids == (0, 1, 2, 3, 4, 5)
    assert told.text == "a\nb</think>\nso it"
    assert told.num_reasoning_tokens == 1
    assert [(part.kind, part.text) for part in told.parts or ()][-1] == ("content", " it")


def test_text_of_min_tokens_is_not_searched() -> None:
    output = sample_of(("a</think>", "s\n", "o\n", "x"), "\n", num_unsearched=2)
    assert [output.push(token_id, None) for token_id in range(3)] == [False, False, True]
    assert output.output().text == "a</think>s\no"


def test_an_answer_without_a_stop_string_ends_as_the_engine_says() -> None:
    output = sample_of(("a\n", "b"), "\n")
    for token_id in range(2):
        assert not output.push(token_id, None)
    output.finish(
        Finished(
            request_id=0,
            sample=0,
            finish_reason="length",
            num_prompt_tokens=1,
            num_generated_tokens=2,
            num_cached_tokens=0,
            stop_token_id=None,
        )
    )
    told = output.output()
    assert (told.finish_reason, told.text, told.token_ids) == ("length", "a\nb", (0, 1))
