"""Numbers of a JSON Schema as terminals in Lark's notation; without a bound a model may write
digits for ever. Invariant: each text that a terminal matches is a number within the schema's
bounds.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

INT_DIGITS = 19
FRACTION_DIGITS = 17  # at most so many, and as many as the schema's bounds have
_EXPONENT = r"[eE](\+?([0-9]{1,2}|1[0-9]{2}|2[0-8][0-9])|-[0-9]{1,3})"
"""With 19 digits before it, a number of at most 1e308: none is infinite where it is read."""

_MAX_DIGITS = 400  # of a bound itself, which may be written as 1e300


class UnboundedDigitsError(ValueError):
    """A bound has more digits than a terminal may have."""


class EmptyRangeError(ValueError):
    """No number is within the bounds."""


def number_terminal(schema: Mapping[str, Any], *, is_integer: bool) -> str:
    """Raises EmptyRangeError or UnboundedDigitsError."""
    low, is_low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
    if low is not None and high is not None:
        if low > high or (low == high and (is_low_open or is_high_open)):
            raise EmptyRangeError
        if is_integer and not _has_integer(low, high, is_low_open, is_high_open):
            raise EmptyRangeError
    given = [each for each in (low, high) if each is not None]
    int_digits = max(INT_DIGITS, *(len(_digits(each)[0]) for each in given), 0)
    fraction_digits = max(FRACTION_DIGITS, *(len(_digits(each)[1]) for each in given), 0)
    whole = rf"-?(0|[1-9][0-9]{{0,{int_digits - 1}}})"
    fraction = "" if is_integer else rf"(\.[0-9]{{1,{fraction_digits}}})?"
    if not given:
        exponent = "" if is_integer else f"({_EXPONENT})?"
        return f"/{whole}{fraction}{exponent}/"
    parts = [f"/{whole}{fraction}/"]
    if low is not None:
        parts.append(f"/{_at_least(low, is_low_open)}/")
    if high is not None:
        parts.append(f"/{_at_most(high, is_high_open)}/")
    return " & ".join(parts)


def _bound(
    schema: Mapping[str, Any], name: str, exclusive_name: str, stricter: Any
) -> tuple[Decimal | None, bool]:
    """A bound, and whether it is itself outside; `stricter` is max of minima, min of maxima."""
    bound, exclusive = schema.get(name), schema.get(exclusive_name)
    if exclusive is True:  # as draft 4 has it
        return (None, False) if bound is None else (_decimal(bound), True)
    if exclusive is None or exclusive is False:
        return (None, False) if bound is None else (_decimal(bound), False)
    opened = _decimal(exclusive)
    if bound is None:
        return opened, True
    closed = _decimal(bound)
    chosen = stricter(opened, closed)
    return chosen, chosen == opened


def _decimal(bound: object) -> Decimal:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise UnboundedDigitsError
    found = Decimal(repr(bound))
    if not found.is_finite() or abs(found.adjusted()) > _MAX_DIGITS:
        raise UnboundedDigitsError
    return found


def _has_integer(low: Decimal, high: Decimal, is_low_open: bool, is_high_open: bool) -> bool:
    first = math.ceil(low) + (is_low_open and low % 1 == 0)
    last = math.floor(high) - (is_high_open and high % 1 == 0)
    return first <= last


def _digits(number: Decimal) -> tuple[str, str]:
    """Before the point, and after it up to the last that is not 0."""
    whole, _, fraction = f"{abs(number):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(bound: Decimal, is_open: bool) -> str:
    if bound > 0 or (bound == 0 and is_open):
        return _above(bound, is_open)
    if bound == 0:
        return r"[0-9].*"
    return rf"[0-9].*|-({_below(bound, is_open)})"


def _at_most(bound: Decimal, is_open: bool) -> str:
    if bound < 0 or (bound == 0 and is_open):
        return f"-({_above(bound, is_open)})"
    return f"-.*|{_below(bound, is_open)}"


def _above(bound: Decimal, is_open: bool) -> str:
    whole, fraction = _digits(bound)
    larger = [rf"[1-9][0-9]{{{len(whole)},}}(\.[0-9]+)?"]
    for place, digit in enumerate(whole):
        if digit != "9":
            rest = len(whole) - place - 1
            larger.append(rf"{whole[:place]}[{int(digit) + 1}-9][0-9]{{{rest}}}(\.[0-9]+)?")
    larger += [
        rf"{whole}\.{fraction[:place]}[{int(digit) + 1}-9][0-9]*"
        for place, digit in enumerate(fraction)
        if digit != "9"
    ]
    behind = rf"{fraction}[0-9]*[1-9][0-9]*" if is_open else rf"{fraction}[0-9]*"
    if not fraction and not is_open:
        larger.append(rf"{whole}(\.[0-9]+)?")
    else:
        larger.append(rf"{whole}\.{behind}")
    return "|".join(larger)


def _below(bound: Decimal, is_open: bool) -> str:
    whole, fraction = _digits(bound)
    smaller: list[str] = []
    if len(whole) > 1:
        smaller.append(rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}})(\.[0-9]+)?")
    for place, digit in enumerate(whole):
        least = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = len(whole) - place - 1
            first = f"[{least}-{int(digit) - 1}]"
            smaller.append(rf"{whole[:place]}{first}[0-9]{{{rest}}}(\.[0-9]+)?")
    if fraction:
        smaller.append(whole)
    for place, digit in enumerate(fraction):
        if digit != "0":
            smaller.append(rf"{whole}\.{fraction[:place]}[0-{int(digit) - 1}][0-9]*")
        if place:
            smaller.append(rf"{whole}\.{fraction[:place]}")
    if not is_open:
        smaller.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")
    return "|".join(smaller) or "[^0-9]"
