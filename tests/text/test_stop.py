"""Stop strings: the parts put together are the whole text, cut at the earliest one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.text.tokens.stop import StopMatch, StopMatcher

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
) -> None:
    check_split(text, stops, cuts, is_included)


@settings(max_examples=NUM_CASES)
@given(
    text=LETTERS,
    stops=st.lists(st.text("ab", min_size=1, max_size=24), min_size=65, max_size=65, unique=True),
    cuts=CUTS,
)
def test_so_do_many_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    long = [stop for stop in stops if len(stop) > 4]
    check_split(text, long, cuts, is_included=False)


@pytest.mark.soak
@settings(max_examples=NUM_SOAK_CASES)
@given(text=LETTERS, stops=STOPS, cuts=CUTS, is_included=st.booleans())
def test_any_of_many_splits_gives_the_text_cut_afterwards(
    text: str, stops: list[str], cuts: list[int], is_included: bool
) -> None:
    check_split(text, stops, cuts, is_included)


@settings(max_examples=NUM_CASES)
@given(text=st.text(max_size=12), stops=st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_any_characters_may_stand_in_a_stop_string(text: str, stops: list[str]) -> None:
    stops = [*stops, *(text[index : index + 2] for index in range(0, len(text), 5))]
    expected = cut_afterwards(text, stops, is_included=False)
    assert stream(StopMatcher(stops), list(text)) == expected


def test_every_split_of_every_short_text_gives_the_text_cut_afterwards() -> None:
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
def test_only_the_beginning_of_a_stop_string_is_kept_back(text: str, stops: list[str]) -> None:
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
) -> None:
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


def test_a_whole_stop_string_waits_for_an_earlier_one_that_may_still_come() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert (matcher.push("xabc"), matcher.match, matcher.least_end) == ("x", None, 4)
    assert matcher.push("!") == "a"
    assert matcher.match == StopMatch(stop="bc", end=4)
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") + matcher.push("d") == "x"
    assert matcher.match == StopMatch(stop="abcd", end=5)
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") + matcher.flush() == "xa"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c") + matcher.flush() == ""
    assert matcher.match == StopMatch(stop=".", end=2)


@pytest.mark.parametrize("text", ["", "a", "]^-\\"])
def test_without_stop_strings_text_passes_at_once(text: str) -> None:
    matcher = StopMatcher([])
    assert matcher.push(text) == text
    assert matcher.least_end is None


def test_cutting_each_part_alone_would_be_wrong() -> None:
    """The negative control: the definition can tell a matcher across parts from a naive one."""
    parts, stops = ["one EN", "D two"], ["END"]
    naive = "".join(cut_afterwards(part, stops, is_included=False) for part in parts)
    assert naive != cut_afterwards("".join(parts), stops, is_included=False)
