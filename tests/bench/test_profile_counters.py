"""The counters inside the native library: which operations they see, and the bytes they count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends import find_backend
from cadenza.backends.base import Instruments, OpTotals
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.backends.xla.ops.native_program import NativeProgram

pytestmark = pytest.mark.native

PADDED_ROWS, ROWS, IN, OUT = 8, 5, 48, 70
EMPTY = np.zeros(0, np.float32)


@pytest.fixture
def instruments() -> Instruments:
    found = find_backend("auto").open_instruments()
    assert found is not None
    return found


def run_linear(bias: np.ndarray, residual: np.ndarray) -> int:
    """Calls the operation on zeros; the packed weight's bytes."""
    weight = np.zeros((-(-OUT // 32), IN // 2, 32, 2), jnp.bfloat16)
    out = jax.ShapeDtypeStruct((PADDED_ROWS, OUT), jnp.float32)
    x = np.zeros((PADDED_ROWS, IN), jnp.bfloat16)
    program = NativeProgram(load_native_library())
    record = program.call("linear", out)
    done = record(x, weight, np.int32(ROWS), bias, residual, scale=np.float32(1.0))
    program.emit(done).block_until_ready()
    return weight.nbytes


def counted(instruments: Instruments) -> dict[str, OpTotals]:
    return {each.name: each for each in instruments.stop_profile()}


def test_every_operation_has_a_counter(instruments: Instruments):
    instruments.start_profile()
    assert [*counted(instruments)] == [*load_native_library().operations]


def test_a_linear_reads_its_packed_weight_and_the_true_rows(instruments: Instruments):
    run_linear(EMPTY, EMPTY)
    instruments.start_profile()
    weight_bytes = run_linear(EMPTY, EMPTY)
    linear = counted(instruments)["linear"]
    assert linear.num_calls == 1
    assert linear.read_bytes == weight_bytes + ROWS * IN * 2
    assert linear.elapsed_s > 0


def test_a_linear_reads_its_bias_and_residual_too(instruments: Instruments):
    instruments.start_profile()
    bias, residual = np.zeros(OUT, np.float32), np.zeros((PADDED_ROWS, OUT), np.float32)
    weight_bytes = run_linear(bias, residual)
    assert counted(instruments)["linear"].read_bytes == (
        weight_bytes + ROWS * IN * 2 + OUT * 4 + ROWS * OUT * 4
    )


def test_nothing_is_counted_when_the_profile_is_off(instruments: Instruments):
    instruments.start_profile()
    instruments.stop_profile()
    run_linear(EMPTY, EMPTY)
    assert counted(instruments)["linear"].num_calls == 0


def test_the_native_roofline_is_positive_and_finite(instruments: Instruments):
    assert 0 < instruments.read_bytes_per_s(instruments.new_buffer(8 << 20), repeats=1) < 1e15
    for dtype in ("bfloat16", "float32"):
        assert 0 < instruments.operations_per_s(dtype, repeats=1) < 1e18
