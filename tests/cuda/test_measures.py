"""The rates of a card: on the emulation each trial takes a second, so a rate is a trial's work."""

import ctypes

import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary

pytestmark = [pytest.mark.native, pytest.mark.kernels]

MEGABYTE = 1 << 20
WARPS, STEPS, CHAINS = 16, 2, 8  # of the loops in registers, for one processor


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("read", MEGABYTE),
        ("copy", MEGABYTE),
        ("bf16", WARPS * STEPS * CHAINS * 2 * 16 * 8 * 16),
        ("int8", WARPS * STEPS * CHAINS * 2 * 16 * 8 * 32),
    ],
)
def test_a_rate_is_the_work_of_a_trial_in_its_time(
    library: CudaLibrary, name: str, work: int
) -> None:
    rate = ctypes.c_double()
    measure = getattr(library.handle, f"cadenza_cuda_measure_{name}")
    measure.restype = ctypes.c_char_p
    assert measure(ctypes.byref(rate)) is None
    assert rate.value == work
