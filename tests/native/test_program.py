"""Programs: operations recorded while a function is traced, run by one call."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cadenza.backends.xla.ops.native_library import NativeLibrary
from cadenza.backends.xla.ops.native_program import NativeProgram, Storage, set_offsets

pytestmark = pytest.mark.native

BF16 = ml_dtypes.bfloat16
ROWS, WIDTH, HIDDEN = 5, 48, 80
COUNT = np.int32(ROWS)
STREAM = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
NORMED = jax.ShapeDtypeStruct((ROWS, WIDTH), BF16)
GATED = jax.ShapeDtypeStruct((ROWS, HIDDEN), BF16)
EPS, ONE = np.float32(1e-5), np.float32(1.0)


@pytest.fixture
def operands(pack: Any, random: np.random.Generator) -> tuple[Any, ...]:
    stream = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    norm = random.normal(size=WIDTH).astype(np.float32)
    gate, up = (random.normal(size=(HIDDEN, WIDTH)).astype(BF16) for _ in range(2))
    down = random.normal(size=(WIDTH, HIDDEN)).astype(BF16)
    return stream, norm, pack(gate, up, dtype=BF16, is_gated=True), pack(down, dtype=BF16)


def mlp(call: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    stream, norm, gate_up, down = operands
    x = call("rms_norm_add", STREAM)(stream, norm, COUNT, stream, None, eps=EPS)
    for _ in range(2):
        normed = call("rms_norm", NORMED)(x, norm, COUNT, eps=EPS)
        gated = call("gated_linear", GATED)(normed, gate_up, COUNT, None, activation=np.int64(0))
        x = call("linear", STREAM, {4: 0})(gated, down, COUNT, None, x, scale=ONE)
    return x


def test_a_program_gives_the_bits_of_its_operations_called_one_by_one(
    library: NativeLibrary, operands: tuple[Any, ...]
):
    def together(*arrays: Any) -> Any:
        program = NativeProgram(library)
        return program.emit(mlp(program.call, arrays))

    def one_by_one(*arrays: Any) -> Any:
        def call(name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
            program = NativeProgram(library)
            record = program.call(name, results, aliases)
            return lambda *operands, **attributes: program.emit(record(*operands, **attributes))

        return mlp(call, arrays)

    whole, parts = (np.asarray(jax.jit(each)(*operands)) for each in (together, one_by_one))
    assert np.abs(whole).max() > 1
    assert whole.tobytes() == parts.tobytes()
    assert [count_calls(each, operands) for each in (together, one_by_one)] == [1, 7]


def count_calls(function: Callable[..., Any], operands: tuple[Any, ...]) -> int:
    text = jax.jit(function).lower(*operands).as_text()
    return len(re.findall(r"custom_call @\w*cadenza_program", text))


def test_what_an_operation_overwrote_cannot_be_used_again(
    library: NativeLibrary, operands: tuple[Any, ...]
):
    stream, norm, _, _ = operands
    program = NativeProgram(library)
    x = program.call("rms_norm_add", STREAM)(stream, norm, COUNT, stream, None, eps=EPS)
    program.call("rms_norm_add", STREAM, {3: 0})(x, norm, COUNT, x, None, eps=EPS)
    with pytest.raises(AssertionError, match="was overwritten"):
        program.call("rms_norm", NORMED)(x, norm, COUNT, eps=EPS)
    with pytest.raises(AssertionError, match="was overwritten"):
        program.emit(x)


def test_an_operand_is_overwritten_only_if_it_becomes_an_output(
    library: NativeLibrary, operands: tuple[Any, ...]
):
    stream, norm, _, _ = operands
    program = NativeProgram(library)
    changed = program.call("rms_norm_add", STREAM, {3: 0})(
        stream, norm, COUNT, stream, None, eps=EPS
    )
    normed = program.call("rms_norm", NORMED)(changed, norm, COUNT, eps=EPS)
    with pytest.raises(AssertionError, match="not an output"):
        program.emit(normed)


def test_attributes_are_checked_by_name(library: NativeLibrary, operands: tuple[Any, ...]):
    stream, norm, _, _ = operands
    with pytest.raises(AssertionError, match="rms_norm has the attributes"):
        NativeProgram(library).call("rms_norm", NORMED)(stream, norm, COUNT, epsilon=EPS)


@pytest.mark.parametrize(
    ("arrays", "operations", "message"),
    [
        ([], [99, 0], "no operation has this index"),
        ([], [3, 2, 1, 1], "another number of parameters"),
        ([], [3, 3, 1, 1], "another number of parameters"),
        ([], [3, 3, 1, 1, 77], "out of range|range"),
        ([0, 1, 1, 17], [], "does not fit the scratch memory"),
        ([-4, 1, 1, 1], [], "does not fit the scratch memory"),
        ([0, 9, 1, 1], [], "must be 0, 1 or 2"),
    ],
)
def test_words_that_are_no_program_are_an_error(
    library: NativeLibrary, arrays: list[int], operations: list[int], message: str
):
    scratch = jax.ShapeDtypeStruct((64,), jnp.uint8)
    call = jax.ffi.ffi_call(library.target, (scratch,))
    words = [np.array(each, np.int64) for each in (arrays, operations)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            call(np.zeros(4), arrays=words[0], operations=words[1], is_portable=False)
        )


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=30))
@example([(1, 2), (0, 1), (1, 0)])
def test_storages_in_use_at_the_same_time_do_not_overlap(sizes: list[tuple[int, int]]):
    storages = [
        Storage(first, first + length, None, size) for first, (size, length) in enumerate(sizes)
    ]
    end = set_offsets(storages)
    assert end <= sum(64 * -(-each.num_bytes // 64) for each in storages)
    for index, one in enumerate(storages):
        assert one.offset % 64 == 0
        assert one.offset + one.num_bytes <= end
        for other in storages[:index]:
            if other.last >= one.first and one.num_bytes and other.num_bytes:
                apart = one.offset >= other.offset + other.num_bytes
                assert apart or other.offset >= one.offset + one.num_bytes


def test_memory_is_used_again_when_its_array_is_no_longer_needed():
    storages = [Storage(first, first + 1, None, 100) for first in range(50)]
    assert set_offsets(storages) <= 2 * 128
