"""The time that is left of `bench throughput`, by hand."""

import pytest

from cadenza.bench.throughput import RemainingTime, about
from cadenza.bench.workloads import Workload

WORKLOAD = Workload(input_len=10, output_len=16, repeats=2, concurrency=(1, 4))
BUDGET = 5  # a prefill run has the prompts of four full steps: two of them, and at 4 rows four


def test_nothing_is_known_before_the_first_repeat():
    assert RemainingTime(workload=WORKLOAD, token_budget=BUDGET).seconds is None


def test_what_is_left_follows_from_the_rates_of_what_was_done():
    left = RemainingTime(workload=WORKLOAD, token_budget=BUDGET)
    one_s = (1 + 2) * 10 * 0.01 + 16 * 0.5
    left.add(1, one_s, decode_tok_s=2.0, prefill_tok_s=100.0)
    four_step_s = 0.5 + 3 * 0.01
    four_s = (4 + 4) * 10 * 0.01 + 16 * four_step_s
    warm_s = (4 + 4) * 10 * 0.01 + 8 * four_step_s
    assert left.seconds == pytest.approx(one_s + warm_s + 2 * four_s)
    left.add(1, 3 * one_s, decode_tok_s=2.0, prefill_tok_s=100.0)  # twice as long as said in all
    assert left.seconds == pytest.approx(2 * (warm_s + 2 * four_s))
    left.add(4, 2 * four_s, decode_tok_s=4 / four_step_s, prefill_tok_s=100.0)
    assert left.seconds == pytest.approx(2 * four_s)
    left.add(4, 2 * four_s, decode_tok_s=4 / four_step_s, prefill_tok_s=100.0)
    assert left.seconds == 0


def test_fewer_rows_than_were_measured_take_at_most_as_long():
    workload = Workload(input_len=10, output_len=16, repeats=1, concurrency=(4, 1))
    left = RemainingTime(workload=workload, token_budget=BUDGET)
    left.add(4, (4 + 4) * 0.1 + 16.0, decode_tok_s=4.0, prefill_tok_s=100.0)
    assert left.seconds == pytest.approx((1 + 2) * 0.1 + 16.0 + (1 + 2) * 0.1 + 8.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "5 s"), (41.0, "40 s"), (89.0, "90 s"), (95.0, "2 min")]
)
def test_a_time_is_said_as_exactly_as_it_is_known(seconds: float, text: str):
    assert about(seconds) == text
