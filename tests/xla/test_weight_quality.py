"""Weights in 8 and 4 bits on the bundled model: how far its distributions are from float32's.

The quantised side computes as users do: activations in bfloat16, in int8 where they are multiplied
with codes.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.table import Linear
from cadenza.config import Quantization
from cadenza.weights.quantised_weight import HostWeight, QuantisedWeight, quantise_int4
from cadenza.weights.weight_format import WeightFormat
from tests.xla.divergence import BUNDLED, LogitOps, Logprobs, held_out_texts, logprobs_of, mean_kl

pytestmark = pytest.mark.native

MOST_KL: dict[Quantization, float] = {"int8": 1e-3, "int4": 6e-2}


class SwappedNibbles(LogitOps):
    """Makes codes of 4 bits and takes the two of each byte in the wrong order."""

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        return super().load_linear([swapped(part) for part in parts], bias, format)

    def load_gate_up(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        return super().load_gate_up([swapped(part) for part in parts], bias, format)


def swapped(weight: HostWeight) -> QuantisedWeight:
    made = quantise_int4(np.asarray(weight))
    pairs = made.codes.reshape(len(made), -1, 2)
    return replace(made, codes=np.ascontiguousarray(pairs[..., ::-1]).reshape(made.shape))


@functools.cache
def exact_logprobs() -> Logprobs:
    return [*logprobs_of(held_out_texts(), BUNDLED, dtype=jnp.float32)]


def quantised(quantization: Quantization, table: type[LogitOps] = LogitOps) -> Logprobs:
    return logprobs_of(
        held_out_texts(), BUNDLED, table, dtype=jnp.bfloat16, quantization=quantization
    )


@pytest.mark.parametrize("quantization", MOST_KL)
def test_quantised_weights_are_within_the_bound_of_float32(quantization: Quantization):
    kl = mean_kl(exact_logprobs(), quantised(quantization))
    assert MOST_KL[quantization] / 10 < kl < MOST_KL[quantization], f"{kl:.2e} nats"


def test_swapped_nibbles_are_beyond_the_bound():
    kl = mean_kl(exact_logprobs(), quantised("none", SwappedNibbles))
    assert kl > 10 * MOST_KL["int4"], f"{kl:.2e} nats"
