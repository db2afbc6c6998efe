"""`by_day`: which of many cases of one kind `make test` has."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def by_day(cases: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """The cases as parameters of a test; those that are not chosen are left to `make soak`."""
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.soak) for case in cases]
