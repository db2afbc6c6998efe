"""`PromptLookup` against a search of the whole list; how the sequences of a request draft."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.drafting.drafts import (
    FIRST_ACCEPTANCE,
    FIRST_PAUSE,
    MAX_CANDIDATES,
    MAX_PAUSE,
    PROBE_EVERY,
    Drafting,
    PromptLookup,
    SharedAcceptance,
    drafting_of,
)
from cadenza.errors import InvalidRequestError
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

Tokens = list[int]


def search(tokens: Tokens, shortest: int, longest: int) -> int:
    """Where the longest match of the newest tokens ends, the newest of equals; 0 for none."""
    best, best_length, num_candidates = 0, 0, 0
    for end in range(len(tokens) - 1, shortest - 1, -1):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length < shortest:
            continue
        num_candidates += 1
        if num_candidates > MAX_CANDIDATES:
            break
        if length > best_length:
            best, best_length = end, length
    return best


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    most=st.integers(1, 20),
)
def test_it_finds_the_newest_of_the_longest_matches_however_the_tokens_came(
    tokens: Tokens, cuts: Tokens, bounds: tuple[int, int], most: int
) -> None:
    shortest, longest = bounds[0], sum(bounds)
    lookup = PromptLookup(shortest=shortest, longest=longest)
    for end in sorted(cuts):
        lookup.propose(tokens[:end], 1)
    drafts = lookup.propose(tokens, most)
    end = search(tokens, shortest, longest)
    expected = tokens.copy()
    for _ in range(most if end else 0):
        expected.append(expected[end])
        end += 1
    assert drafts == expected[len(tokens) :]


def test_a_prediction_is_looked_up_like_the_streams_own_tokens() -> None:
    lookup = PromptLookup(shortest=2, longest=4, prediction=(5, 6, 7, 8, 9))
    assert lookup.propose([1, 2, 6, 7], 3) == [8, 9, 1]
    assert lookup.propose([1, 2, 6, 7, 8], 1) == [9]
    assert lookup.propose([1, 2, 6, 7, 8, 1], 1) == []


class Fixed:
    """Proposes zeros, or nothing."""

    def __init__(self, is_silent: bool) -> None:
        self.is_silent = is_silent

    def propose(self, token_ids: Tokens, most: int) -> Tokens:
        return [] if self.is_silent else [0] * most


@pytest.mark.parametrize("is_silent", [False, True])
def test_drafts_that_never_help_become_rare(is_silent: bool) -> None:
    drafting = Drafting(source=Fixed(is_silent), most=3)
    tried: list[int] = []
    for num_tokens in range(1, 4000):
        due = drafting.is_due(num_tokens)
        drafts = drafting.propose([1] * num_tokens, 5)
        assert len(drafts) == (0 if is_silent or not due else 3)
        tried += [num_tokens] * due
        if drafts:
            drafting.learn(num_tokens, len(drafts), 0)
    assert 0 < len(tried) < 80
    pauses = [after - before for before, after in pairwise(tried)]
    assert set(pauses) >= {1, FIRST_PAUSE, MAX_PAUSE}
    assert max(pauses) <= MAX_PAUSE


def test_drafts_that_help_never_pause() -> None:
    rng = random.Random(1)
    drafting = Drafting(source=Fixed(is_silent=False), most=4)
    for num_tokens in range(1, 2000):
        assert drafting.propose([1] * num_tokens, 5) == (0, 0, 0, 0)
        drafting.learn(num_tokens, 4, rng.choice([0, 1, 2, 3]))


def test_the_acceptance_follows_what_is_met_at_once_and_later_slowly() -> None:
    drafting = Drafting(source=Fixed(is_silent=False), most=8)
    drafting.learn(1, 3, 0)
    assert drafting.acceptance == pytest.approx(2 * 0.8 / 3)
    for _ in range(100):
        drafting.learn(1, 3, 1)  # one hit, one miss
    assert drafting.acceptance == pytest.approx(0.5, abs=0.06)
    assert drafting.found == 1.0


def test_a_sequence_whose_drafts_are_not_worth_it_tries_again_ever_later() -> None:
    drafting = Drafting(source=Fixed(is_silent=False), most=8, acceptance=0.1)
    num_tokens, pauses, hopes = 1, list[int](), [0.1]
    for _ in range(6):
        drafting.pause(num_tokens)
        pauses.append(drafting.resumes_at - num_tokens)
        num_tokens = drafting.resumes_at
        hopes.append(drafting.acceptance)
    assert pauses == [16, 32, 64, 64, 64, 64]
    assert hopes == sorted(hopes)
    assert 0.5 < hopes[-1] < 0.8


def test_the_share_of_steps_with_drafts_is_known() -> None:
    rng = random.Random(2)
    source = Fixed(is_silent=False)
    drafting = Drafting(source=source, most=1)
    shares: list[float] = []
    for _ in range(400):
        source.is_silent = rng.random() < 0.7
        drafting.resumes_at = 0
        drafting.propose([1], 1)
        shares.append(drafting.found)
    assert sum(shares[20:]) / len(shares[20:]) == pytest.approx(0.3, abs=0.05)


def test_a_placeholder_is_never_proposed() -> None:
    tokens = [1, 2, 3, 9, 9, 9, 9, 4, 1, 2]
    assert PromptLookup(shortest=2, longest=3).propose(tokens, 4) == [3, 9, 9, 9]
    assert PromptLookup(shortest=2, longest=3, placeholder=9).propose(tokens, 4) == [3]


SERVED = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("speculative", "prediction", "config", "most"),
    [
        (None, (), None, None),
        (None, (), SERVED, 4),
        (True, (), None, 5),
        (True, (), SERVED, 4),
        (False, (), SERVED, None),
        (False, (1, 2), SERVED, None),
        (2, (), None, 2),
        (2, (), SERVED, 2),
        (9, (), SERVED, 4),
        (9, (), None, 9),
        (None, (1, 2), None, MAX_SPECULATIVE_TOKENS),
        (None, (1, 2), SERVED, 4),
        (3, (1, 2), None, 3),
    ],
)
def test_a_request_chooses_its_drafts(
    speculative: bool | int | None,
    prediction: tuple[int, ...],
    config: SpeculativeConfig | None,
    most: int | None,
) -> None:
    params = SamplingParams(speculative=speculative)
    request = Request(prompt_token_ids=(1,), params=params, prediction=prediction)
    drafting = drafting_of(request, config)
    assert (None if drafting is None else drafting.most) == most
    if drafting is not None:
        assert drafting.is_asked == (speculative is not None or bool(prediction))
        assert drafting.group == ("ngram", drafting.is_asked)


def test_a_number_of_drafts_may_be_given_by_its_name() -> None:
    named = SamplingParams(speculative={"num_speculative_tokens": 3})
    assert named == SamplingParams(speculative=3)
    for wrong in (0, 17, 1.5, "on", {"num_drafts": 3}, {"num_speculative_tokens": True}):
        with pytest.raises(InvalidRequestError, match="num_speculative_tokens"):
            SamplingParams(speculative=wrong)  # type: ignore[arg-type]


def test_sequences_start_from_what_others_have_met_and_some_do_not() -> None:
    shared = SharedAcceptance()
    for _ in range(1000):
        shared.learn(is_accepted=False)
    starts = [shared.start() for _ in range(2 * PROBE_EVERY)]
    assert sum(start > 0.5 for start in starts) == 2
    assert min(starts) < 0.01


def test_a_request_that_asks_starts_from_what_those_that_ask_have_met() -> None:
    shared = {False: SharedAcceptance(), True: SharedAcceptance()}
    config = SpeculativeConfig(method="quantised")

    def started(speculative: bool | None) -> Drafting:
        params = SamplingParams(speculative=speculative)
        found = drafting_of(Request(prompt_token_ids=(1,), params=params), config, shared)
        assert found is not None
        return found

    silent = started(None)
    for _ in range(1000):
        silent.learn(2, 1, 0)
    assert started(None).acceptance < 0.01
    asking = started(True)
    assert (asking.acceptance, asking.group) == (FIRST_ACCEPTANCE, ("model", True))
    for _ in range(1000):
        asking.learn(2, 1, 0)
    assert started(True).acceptance < 0.01
