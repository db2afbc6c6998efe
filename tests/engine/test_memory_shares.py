"""Memory for engines side by side: fair, and never more than there is."""

from itertools import combinations

import pytest

from cadenza.errors import ConfigError
from cadenza.loading.plan import memory_shares


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_any_models_that_may_be_loaded_together_fit(num_engines: int) -> None:
    weights, available = [100, 7000, 300, 2000], 10_000
    shares = memory_shares(weights, num_engines, available)
    assert all(share > weight for share, weight in zip(shares, weights, strict=True))
    for together in combinations(shares, num_engines):
        assert sum(together) <= available


def test_what_the_largest_models_leave_is_shared_equally() -> None:
    assert memory_shares([100, 700, 200], 2, 1000) == [150, 750, 250]


def test_weights_that_do_not_fit_together_are_refused_with_the_number_that_does() -> None:
    with pytest.raises(ConfigError, match=r"take 13000 bytes.*set --max-loaded-models 1"):
        memory_shares([7000, 6000, 100], 2, 10_000)
