"""`benchmarks/speculation.py --acceptance`: from which acceptance on drafts save time, in modelled
times of steps."""

import argparse

import pytest

from benchmarks.speculation import acceptance_of, break_even, chances

WAITING = {number: 10.0 + 2.0 * max(0, number - 4) for number in range(1, 65)}
"""Up to four tokens a step waits for the weights, and each one more takes 2 ms."""


def test_one_draft_breaks_even_where_its_token_is_worth_its_time() -> None:
    assert break_even(WAITING, 3.0, num_rows=1, most=1) == (pytest.approx(0.3), 1)
    assert break_even(WAITING, 3.0, num_rows=4, most=1) == (pytest.approx(1.1), 1)


def test_the_number_of_drafts_is_the_one_that_breaks_even_first() -> None:
    steps_ms = {1: 10.0, 2: 16.0, 3: 16.0, 4: 16.0}
    least, number = break_even(steps_ms, 0.0, num_rows=1, most=3)
    assert number == 3
    assert least + least**2 + least**3 == pytest.approx(0.6)


def test_numbers_of_drafts_that_were_not_measured_are_left_out() -> None:
    assert break_even({16: 10.0, 32: 14.0}, 1.0, num_rows=16, most=5) == (pytest.approx(0.5), 1)


def test_drafts_that_cost_nothing_need_no_acceptance() -> None:
    assert break_even(WAITING, 0.0, num_rows=1, most=3)[0] == 0.0


@pytest.mark.parametrize("acceptance", [0.2, 0.9, 1.0, 1.3])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_acceptance_gives_the_expected_tokens(acceptance: float, number: int) -> None:
    num_tokens = sum(acceptance**place for place in range(number + 1))
    assert acceptance_of(num_tokens, number) == pytest.approx(acceptance)


@pytest.mark.parametrize("text", ["some/model", "0.5,1.5", "0.5,", "nan"])
def test_what_are_no_chances_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}': give numbers from 0 to 1"):
        chances(text)


def test_chances_are_read() -> None:
    assert chances("0.6,0.8,0.0") == [0.6, 0.8, 0.0]
