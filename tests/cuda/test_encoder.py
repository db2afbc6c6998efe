"""The operations of image towers of the kernels for GPUs."""

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, EncoderShape
from tests.xla.encoder_parity import check_attention, check_elements, check_image_rows
from tests.xla.harness import HOSTILE

pytestmark = [pytest.mark.native, pytest.mark.kernels]

DTYPES = ("float32", "bfloat16")


def tables(library: CudaLibrary, dtype: str) -> tuple[CudaOps, OpTable]:
    spec = DecoderSpec(model=HOSTILE, dtype=jnp.dtype(dtype).type, page_size=16)
    return CudaOps(spec, library), OpTable(spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_an_image_is_the_references_in_any_blocks(
    library: CudaLibrary, dtype: str
) -> None:
    shape = EncoderShape(num_heads=1, head_dim=24, scale=0.2)
    check_attention(*tables(library, dtype), shape, 40)


def test_attention_keeps_to_bounds_as_the_reference_does(library: CudaLibrary) -> None:
    first = np.arange(36) // 20 * 20
    bounds = np.stack([first, np.minimum(first + 20, 36)], axis=1).astype(np.int32)
    shape = EncoderShape(num_heads=2, head_dim=8, scale=0.3)
    check_attention(*tables(library, "float32"), shape, 36, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations_are_the_references(library: CudaLibrary, dtype: str) -> None:
    check_elements(*tables(library, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_images_have_the_references_bits(library: CudaLibrary, dtype: str) -> None:
    check_image_rows(*tables(library, dtype))
