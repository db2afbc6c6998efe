"""Stop strings: the parts put together are the whole text, cut at the earliest one."""

import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.events import Finished
from cadenza.frontend.sample_output import ContentStops, SampleOutput
from cadenza.text.answers.json_calls import GENERIC
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartParser, PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.tokens.stop import StopMatch, StopMatcher
from tests.text.parts import Joined, joined, parse

NUM_CASES = 300
NUM_SOAK_CASES = 50_000

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def split(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def cut_afterwards(text: str, stops: list[str], *, is_included: bool) -> str:
    """The definition: of all stop strings in the finished text, the one that begins first."""
    found = sorted((text.find(stop), len(stop)) for stop in stops if stop in text)
    if not found:
        return text
    start, length = found[0]
    return text[: start + length] if is_included else text[:start]


def stream(matcher: StopMatcher, parts: list[str]) -> str:
    return "".join([*map(matcher.push, parts), matcher.flush()])


def check_split(text: str, stops: list[str], cuts: list[int], is_included: bool) -> None:
    matcher = StopMatcher(stops, is_included=is_included)
    expected = cut_afterwards(text, stops, is_included=is_included)
    assert stream(matcher, split(text, cuts)) == expected
    assert (matcher.match is not None) == any(stop in text for stop in stops)


@settings(max_examples=NUM_CASES)
@given(text=LETTERS, stops=STOPS, cuts=CUTS, is_included=st.booleans())
def test_any_split_gives_the_text_cut_afterwards(
    text: str, stops: list[str], cuts: list[int], is_included: bool
):
    check_split(text, stops, cuts, is_included)


@settings(max_examples=NUM_CASES)
@given(
    text=LETTERS,
    stops=st.lists(st.text("ab", min_size=1, max_size=24), min_size=65, max_size=65, unique=True),
    cuts=CUTS,
)
def test_so_do_many_stop_strings(text: str, stops: list[str], cuts: list[int]):
    long = [stop for stop in stops if len(stop) > 4]
    check_split(text, long, cuts, is_included=False)


@pytest.mark.soak
@settings(max_examples=NUM_SOAK_CASES)
@given(text=LETTERS, stops=STOPS, cuts=CUTS, is_included=st.booleans())
def test_any_of_many_splits_gives_the_text_cut_afterwards(
    text: str, stops: list[str], cuts: list[int], is_included: bool
):
    check_split(text, stops, cuts, is_included)


@settings(max_examples=NUM_CASES)
@given(text=st.text(max_size=12), stops=st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_any_characters_may_stand_in_a_stop_string(text: str, stops: list[str]):
    stops = [*stops, *(text[index : index + 2] for index in range(0, len(text), 5))]
    expected = cut_afterwards(text, stops, is_included=False)
    assert stream(StopMatcher(stops), list(text)) == expected


def test_every_split_of_every_short_text_gives_the_text_cut_afterwards():
    stops = ["ab", "abb", "bbab", "aaa"]
    for length in range(8):
        for number in range(1 << length):
            text = "".join("ab"[number >> place & 1] for place in range(length))
            expected = cut_afterwards(text, stops, is_included=False)
            for mask in range(1 << max(0, length - 1)):
                cuts = [place + 1 for place in range(length - 1) if mask >> place & 1]
                assert stream(StopMatcher(stops), split(text, cuts)) == expected


@settings(max_examples=NUM_CASES)
@given(text=LETTERS, stops=STOPS)
def test_only_the_beginning_of_a_stop_string_is_kept_back(text: str, stops: list[str]):
    matcher, shown = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        shown += matcher.push(character)
        kept = text[len(shown) : end]
        if matcher.match is not None:
            break
        assert not kept or any(stop.startswith(kept) and stop != kept for stop in stops)


@settings(max_examples=NUM_CASES)
@given(text=LETTERS, stops=STOPS, cuts=CUTS)
def test_the_least_end_is_never_past_the_end_of_the_match(
    text: str, stops: list[str], cuts: list[int]
):
    matcher = StopMatcher(stops)
    seen: list[int | None] = []
    for part in split(text, cuts):
        matcher.push(part)
        seen.append(matcher.least_end)
    matcher.flush()
    least = [end for end in seen if end is not None]
    assert least == sorted(least)
    if least:
        assert matcher.match is not None
        assert least[-1] <= matcher.match.end


def test_a_whole_stop_string_waits_for_an_earlier_one_that_may_still_come():
    matcher = StopMatcher(["bc", "abcd"])
    assert (matcher.push("xabc"), matcher.match, matcher.least_end) == ("x", None, 4)
    assert matcher.push("!") == "a"
    assert matcher.match == StopMatch(stop="bc", end=4)
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") + matcher.push("d") == "x"
    assert matcher.match == StopMatch(stop="abcd", end=5)
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") + matcher.flush() == "xa"


def test_nothing_follows_a_match():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c") + matcher.flush() == ""
    assert matcher.match == StopMatch(stop=".", end=2)


@pytest.mark.parametrize("text", ["", "a", "]^-\\"])
def test_without_stop_strings_text_passes_at_once(text: str):
    matcher = StopMatcher([])
    assert matcher.push(text) == text
    assert matcher.least_end is None


def test_cutting_each_part_alone_would_be_wrong():
    """The negative control: the definition can tell a matcher across parts from a naive one."""
    parts, stops = ["one EN", "D two"], ["END"]
    naive = "".join(cut_afterwards(part, stops, is_included=False) for part in parts)
    assert naive != cut_afterwards("".join(parts), stops, is_included=False)


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
def test_a_stop_string_acts_in_content_only(text: str, stop: str, shown: Joined):
    plan = PartPlan(reasoning=THINK, tools=TOOL_FORMATS["hermes"])
    assert read(stops_of(plan, [stop]), text)[1] == shown
    assert read(stops_of(plan, [stop]), *text)[1] == shown


def test_the_stop_string_may_be_kept():
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
CONTENT_STOPS = st.lists(
    st.sampled_from(["a", "ab", "b", "\n", "ba", "<to", "a\n\n", "{"]), min_size=1, max_size=3
)


@given(st.sampled_from(PLANS), TEXTS, CONTENT_STOPS, st.data())
def test_any_answer_is_cut_at_the_same_place_however_it_comes(
    plan: PartPlan, text: str, stops: list[str], data: st.DataObject
):
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


def test_tokens_behind_a_stop_string_in_content_are_not_shown():
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


def test_text_of_min_tokens_is_not_searched():
    output = sample_of(("a</think>", "s\n", "o\n", "x"), "\n", num_unsearched=2)
    assert [output.push(token_id, None) for token_id in range(3)] == [False, False, True]
    assert output.output().text == "a</think>s\no"


def test_an_answer_without_a_stop_string_ends_as_the_engine_says():
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
