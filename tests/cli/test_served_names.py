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


def test_a_star_has_the_first_model_take_any_other_name():
    (alone,) = names_of([None], ["*"])
    assert (alone.listed, alone.takes_any) == (("bundled",), True)
    (named,) = names_of([None], ["a", "*", "b"])
    assert (named.listed, named.takes_any) == (("a", "b"), True)
    first, second = names_of([None, "o/m"], ["a", "b", "*"])
    assert (first.listed, first.takes_any, second.listed) == (("a",), True, ("b",))
    assert not second.takes_any
    assert [each.takes_any for each in names_of([None, "o/m"], ["*"])] == [True, False]
    assert not names_of([None], None)[0].takes_any


def test_a_star_is_no_name_of_a_model():
    with pytest.raises(ConfigError, match="given 1 times for 2 models"):
        names_of([None, "o/m"], ["a", "*"])
