"""When requests of an open loop are due: rates, burstiness and ramps."""

import random
from itertools import pairwise

import pytest

from cadenza.bench.datasets import Arrivals
from cadenza.bench.serve_options import LoadOptions


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_the_gaps_have_the_rates_mean_and_a_variance_by_the_burstiness(burstiness: float):
    arrivals = Arrivals(rate=50.0, burstiness=burstiness)
    times = list(arrivals.times(20_000, random.Random(1)))
    assert times[0] == 0.0
    gaps = [later - sooner for sooner, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(0.02**2 / burstiness, rel=0.1)


def test_a_ramp_rises_from_the_first_request_to_the_last():
    linear = Arrivals(rate=2.0, end_rate=10.0, strategy="linear")
    assert [linear.rate_at(at, 5) for at in range(5)] == [2.0, 4.0, 6.0, 8.0, 10.0]
    steep = Arrivals(rate=1.0, end_rate=16.0, strategy="exponential")
    assert [steep.rate_at(at, 5) for at in range(5)] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert (linear.highest_rate, steep.highest_rate) == (10.0, 16.0)
    assert Arrivals(rate=3.0).rate_at(7, 9) == 3.0


def test_a_ramp_without_bursts_has_the_gaps_of_its_rates():
    even = Arrivals(rate=2.0, end_rate=10.0, burstiness=1e6)
    gaps = [b - a for a, b in pairwise(even.times(5, random.Random(1)))]
    assert gaps == pytest.approx([1 / 4, 1 / 6, 1 / 8, 1 / 10], rel=0.01)


def test_a_load_at_rates_is_one_for_each_with_the_same_prompts_in_each_run():
    options = LoadOptions(request_rate=(5.0, 20.0), num_requests=300, burstiness=2.0, seed=3)
    first, second = options.loads(options.source())
    assert [each.arrivals for each in (first, second)] == [
        Arrivals(rate=5.0, burstiness=2.0),
        Arrivals(rate=20.0, burstiness=2.0),
    ]
    assert first.requests[-1].after_s == pytest.approx(60, rel=0.2)
    assert second.requests[-1].after_s == pytest.approx(15, rel=0.2)
    assert tuple(options.loads(options.source())) == (first, second)
    of_round_two = next(options.loads(options.source(), 1))
    sent = {each.prompt_token_ids for load in (first, second) for each in load.requests}
    assert sent.isdisjoint(each.prompt_token_ids for each in of_round_two.requests)


def test_a_ramp_is_one_load():
    options = LoadOptions(
        ramp_up_strategy="exponential", ramp_up_start_rps=1.0, ramp_up_end_rps=4.0, num_requests=9
    )
    (load,) = options.loads(options.source())
    assert load.clients is None
    assert load.arrivals == Arrivals(rate=1.0, end_rate=4.0, strategy="exponential")
    assert len(load.requests) == 9
