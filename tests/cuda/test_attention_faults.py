"""The faults that can be injected into attention on GPUs change bits that depend on a row alone."""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from tests.cuda.attention_rows import Array, Caller, Row, Rows, Variant, in_chunks, whole

pytestmark = [pytest.mark.native, pytest.mark.kernels]

# Of `csrc/core/faults.h`.
RELATIVE_SPANS, NEIGHBOUR_PAGE, NEIGHBOUR_PAGES_FAR, MULTIPLIED_PADDING = 1, 2, 3, 5

VARIANT = Variant(heads=1, kv_heads=1)


@pytest.fixture
def inject(faulty_library: CudaLibrary) -> Iterator[Callable[[int], None]]:
    yield faulty_library.handle.cadenza_cuda_inject_fault
    faulty_library.handle.cadenza_cuda_inject_fault(0)


@pytest.fixture(scope="module")
def call(faulty_library: CudaLibrary) -> Caller:
    return Caller(faulty_library)


def decode(call: Caller, lengths: list[int]) -> Array:
    rows = Rows(call=call, variant=VARIANT, num_pages=100, pages_per_row=50)
    random = np.random.default_rng(1)
    rows.pools = [
        jnp.asarray(random.normal(size=pool.shape).astype(VARIANT.dtype).view(np.uint16))
        for pool in rows.pools
    ]
    parts: list[tuple[Row, int]] = []
    for index, length in enumerate(lengths):
        inputs = VARIANT.inputs(length + 1, index)
        parts.append((Row(inputs, list(range(50 * index, 50 * index + 50)), length), 1))
    return rows.step(parts)[0]


@pytest.mark.parametrize(
    ("fault", "length"), [(NEIGHBOUR_PAGE, 40), (NEIGHBOUR_PAGES_FAR, 660), (NEIGHBOUR_PAGE, 15)]
)
def test_pages_of_another_row_show_in_a_batch(
    call: Caller, inject: Callable[[int], None], fault: int, length: int
) -> None:
    alone = decode(call, [length])
    assert decode(call, [length, 700]).tobytes() == alone.tobytes()
    inject(fault)
    assert decode(call, [length]).tobytes() == alone.tobytes()
    is_read = length >= 16
    assert (decode(call, [length, 700]).tobytes() != alone.tobytes()) == is_read


def test_parts_that_begin_at_the_first_query_show_in_chunks(
    call: Caller, inject: Callable[[int], None]
) -> None:
    inputs = VARIANT.inputs(44, 0)
    sound = whole(call, VARIANT, inputs)
    inject(RELATIVE_SPANS)
    assert whole(call, VARIANT, inputs).tobytes() == sound.tobytes()
    assert in_chunks(call, VARIANT, inputs, [40, 4]).tobytes() != sound.tobytes()


def test_padding_that_is_multiplied_shows_beside_slots_that_hold_nan(
    call: Caller, inject: Callable[[int], None]
) -> None:
    inputs = VARIANT.inputs(5, 0)
    assert np.isfinite(whole(call, VARIANT, inputs).astype(float)).all()
    inject(MULTIPLIED_PADDING)
    assert not np.isfinite(whole(call, VARIANT, inputs).astype(float)).all()
