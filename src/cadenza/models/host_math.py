"""Logarithms, powers, cosines and sines with the same bits on every machine: those of libm and
numpy are rounded differently from one CPU or version to the next. These use only float64 operations
that IEEE 754 rounds exactly, and `decimal`'s exp and ln, which are correctly rounded."""

import math
from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CONTEXT = Context(prec=40)

# pi / 2 as a sum; a multiple of up to 2^26 of the first two parts is exact
_HALF_PI = (105414357 / 2**26, 8935984 / 2**53, 6.123233995736766e-17)

_TURNS_PER_RADIAN = 0.6366197723675814  # quarter turns: 2 / pi

_MOST_TERMS = 9  # of a Taylor series: on [-pi/4, pi/4] the next term is below 2^-60


def log(x: float) -> float:
    """The natural logarithm of a positive number, correctly rounded."""
    return float(Decimal(x).ln(_CONTEXT))


def exp(x: float) -> float:
    """e ** x, correctly rounded."""
    return float(Decimal(x).exp(_CONTEXT))


def power(base: float, exponent: float) -> float:
    """base ** exponent of a positive base; the error is below 1 ulp."""
    logarithm = Decimal(base).ln(_CONTEXT)
    return float(_CONTEXT.multiply(logarithm, Decimal(exponent)).exp(_CONTEXT))


def rotations(angles: Floats) -> tuple[Floats, Floats]:
    """The cosines and sines of angles in radians of magnitude below 2^26; the error is at most 1
    ulp of 1."""
    quarters = np.rint(angles * _TURNS_PER_RADIAN)
    left = angles
    for part in _HALF_PI:
        left = left - quarters * part
    square = left * left
    cosine = _series(square, first=0)
    sine = _series(square, first=1) * left
    quarter = quarters.astype(np.int64) & 3
    is_swapped = quarter % 2 == 1
    cosines, sines = np.where(is_swapped, sine, cosine), np.where(is_swapped, cosine, sine)
    return (
        np.where((quarter == 1) | (quarter == 2), -cosines, cosines),
        np.where(quarter >= 2, -sines, sines),
    )


def _series(square: Floats, *, first: int) -> Floats:
    """The Taylor series of the cosine (`first` 0), or of the sine over the angle (1)."""
    total = np.zeros_like(square)
    for term in reversed(range(_MOST_TERMS)):
        coefficient = (-1.0) ** term / math.factorial(2 * term + first)
        total = total * square + coefficient
    return total
