"""The proof at load: which kernel computes a product in each bucket; other bits are found."""

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from tests.cuda.conftest import Call

pytestmark = [pytest.mark.native, pytest.mark.kernels]

# How the model of cublasLt behaves (`csrc/cuda/fake_cublaslt.h`).
ABSENT, SOUND, BACKWARD = range(3)
SUMS_BY_ROWS, SPLIT_LIBRARY = 6, 7  # faults of `csrc/core/faults.h`
BF16, F32 = 0, 1
BUCKETS = (1, 2, 8, 16, 24)
ALL_OWN = {rows: {"own"} for rows in BUCKETS}


class _Proof(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("format", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("x_is_f32", ctypes.c_int64),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("num_rows", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Prover:
    library: CudaLibrary

    def prove(
        self, weight: np.ndarray, *, is_gated: bool = False, rows: Sequence[int] = BUCKETS
    ) -> tuple[str | None, list[dict[str, Any]]]:
        longs = ctypes.c_int64 * 2
        format = F32 if weight.dtype == np.float32 else BF16
        proof = _Proof(
            *(weight.ctypes.data, format, longs(*weight.shape), 2, *weight.shape),
            *(is_gated, format == F32, (ctypes.c_int64 * len(rows))(*rows), len(rows)),
        )
        report = ctypes.c_char_p()
        prove = self.library.handle.cadenza_cuda_prove
        prove.restype = ctypes.c_char_p
        error = prove(ctypes.byref(proof), ctypes.byref(report))
        return error and error.decode(), json.loads(report.value or b"[]")

    @contextmanager
    def fault(self, fault: int) -> Iterator[None]:
        self.library.handle.cadenza_cuda_inject_fault(fault)
        try:
            yield
        finally:
            self.library.handle.cadenza_cuda_inject_fault(0)


@pytest.fixture
def prover(library: CudaLibrary) -> Iterator[Prover]:
    yield Prover(library)
    library.handle.cadenza_cuda_behave(SOUND)


def weight_of(n: int, k: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.asarray(jnp.asarray(np.random.default_rng(n).normal(size=(n, k)), dtype))


def kernels(found: list[dict[str, Any]]) -> dict[int, set[str]]:
    return {rows: {each["kernel"] for each in found if each["rows"] == rows} for rows in BUCKETS}


@pytest.mark.parametrize("is_gated", [False, True])
def test_buckets_of_many_rows_are_computed_by_cublaslt_where_its_bits_are_ours(
    prover: Prover, is_gated: bool
) -> None:
    error, found = prover.prove(weight_of(48, 72), is_gated=is_gated)
    assert error is None
    own, shared = {"own"}, {"cublasLt"}
    assert kernels(found) == {1: own, 2: own, 8: own, 16: shared, 24: shared}
    assert {each["result"] for each in found} == {"float32", "bfloat16"}
    assert all("splits 1" in each["found"] for each in found if each["rows"] >= 16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_library_that_adds_in_another_order_is_not_used(prover: Prover, is_gated: bool) -> None:
    prover.library.handle.cadenza_cuda_behave(BACKWARD)
    error, found = prover.prove(weight_of(48, 72), is_gated=is_gated)
    assert error is None
    assert kernels(found) == ALL_OWN
    assert [each["rows"] for each in found if each["cublaslt_differs"]] == [16, 24, 16, 24]


def test_a_planted_algorithm_that_splits_k_is_found_and_not_used(prover: Prover) -> None:
    with prover.fault(SPLIT_LIBRARY):
        error, found = prover.prove(weight_of(48, 72))
    assert error is None
    assert kernels(found) == ALL_OWN
    many = [each for each in found if each["rows"] >= 16]
    assert all(each["cublaslt_differs"] and "splits 4" in each["found"] for each in many)


def test_without_cublaslt_our_kernels_compute_all_buckets(prover: Prover) -> None:
    prover.library.handle.cadenza_cuda_behave(ABSENT)
    assert prover.library.handle.cadenza_cuda_cublaslt_version() == 0
    error, found = prover.prove(weight_of(48, 72))
    assert error is None
    assert kernels(found) == ALL_OWN
    assert {each["found"] for each in found if each["rows"] >= 16} == {"cublasLt was not found"}


@pytest.mark.parametrize("is_gated", [False, True])
def test_all_our_kernels_have_the_bits_of_a_row_alone_and_the_fastest_is_named(
    prover: Prover, is_gated: bool
) -> None:
    prover.library.handle.cadenza_cuda_behave(ABSENT)
    error, found = prover.prove(weight_of(48, 72), is_gated=is_gated, rows=(4, 13, 30, 50, 70))
    assert error is None
    tiles = {each["rows"]: each["tile"] for each in found}
    assert tiles[70] == "128x128, 3 stages"
    assert len(set(tiles.values())) == 5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("is_gated", [False, True])
def test_own_kernels_whose_order_depends_on_the_rows_fail_with_the_shape(
    prover: Prover, dtype: Any, is_gated: bool
) -> None:
    weight = weight_of(32, 136, dtype)
    assert prover.prove(weight, is_gated=is_gated, rows=(8, 9))[0] is None
    with prover.fault(SUMS_BY_ROWS):
        error, _ = prover.prove(weight, is_gated=is_gated, rows=(8, 9))
    assert error is not None
    assert "[32, 136]" in error
    assert "in a step of 9 rows" in error


def linear(call: Call, x: jax.Array, weight: np.ndarray, **given: Any) -> np.ndarray:
    out = jax.ShapeDtypeStruct((len(x), len(weight)), given.get("dtype", jnp.float32))
    operands = (x, weight, jnp.int32(len(x)), given.get("bias"), given.get("residual"))
    found = call("linear", out, *operands, scale=np.float32(given.get("scale", 1)))
    return np.asarray(found.astype(jnp.float32))


def gated(call: Call, x: jax.Array, weight: np.ndarray) -> np.ndarray:
    out = jax.ShapeDtypeStruct((len(x), len(weight) // 2), jnp.bfloat16)
    found = call("gated_linear", out, x, weight, jnp.int32(len(x)), None, activation=1)
    return np.asarray(found.astype(jnp.float32))


def test_proven_products_of_cublaslt_finish_like_those_of_our_kernels(
    prover: Prover, call: Call
) -> None:
    generator = np.random.default_rng(7)
    weight, x = weight_of(48, 40), jnp.asarray(generator.normal(size=(16, 40)), jnp.bfloat16)
    bias, residual = (
        np.float32(generator.normal(size=48)),
        np.float32(generator.normal(size=(16, 48))),
    )
    cases = (
        {},
        {"dtype": jnp.bfloat16},
        {"residual": residual},
        {"residual": residual, "bias": bias, "scale": 0.3},
        {"bias": bias, "dtype": jnp.bfloat16},
    )
    own = [linear(call, x, weight, **case) for case in cases] + [gated(call, x, weight)]
    for is_gated in (False, True):
        _, found = prover.prove(weight, is_gated=is_gated, rows=(16,))
        assert {each["kernel"] for each in found} == {"cublasLt"}
    shared = [linear(call, x, weight, **case) for case in cases] + [gated(call, x, weight)]
    for ours, theirs in zip(own, shared, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_gated_product_of_cublaslt_by_parts_of_its_columns_has_the_bits_of_our_kernels(
    prover: Prover, call: Call
) -> None:
    x = jnp.asarray(np.random.default_rng(4).normal(size=(16, 16)), jnp.bfloat16)
    weight = weight_of(368, 16)  # 184 columns: 128 at a time in the emulation, and 56
    own = gated(call, x, weight)
    _, found = prover.prove(weight, is_gated=True, rows=(16,))
    assert {each["kernel"] for each in found} == {"cublasLt"}
    np.testing.assert_array_equal(gated(call, x, weight), own)


def test_a_product_that_was_not_proven_is_computed_by_our_kernels(
    prover: Prover, call: Call
) -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 40)), jnp.bfloat16)
    weight = weight_of(64, 40)
    own = linear(call, x, weight)
    prover.library.handle.cadenza_cuda_behave(BACKWARD)
    np.testing.assert_array_equal(linear(call, x, weight), own)


def test_a_proof_without_numbers_of_rows_is_refused(prover: Prover) -> None:
    weight = weight_of(48, 40)
    error, _ = prover.prove(weight, rows=())
    assert error is not None
    assert "no numbers of rows" in error
