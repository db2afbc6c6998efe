"""The names of the models that `cadenza serve` serves."""

import pytest

from cadenza.cli.served_models import names_of
from cadenza.errors import ConfigError


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x1b[2J"])
def test_a_name_that_no_request_could_have_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"--served-model-name .* from 1 to 256 characters"):
        names_of([None], [name])


def test_a_name_that_is_given_twice_is_listed_once():
    (names,) = names_of([None], ["a", "b", "a"])
    assert names.listed == ("a", "b")
