"""The CPU kernels' operations of image towers, called as a tower calls them."""

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, EncoderShape
from tests.xla.encoder_parity import check_attention, check_elements, check_image_rows
from tests.xla.harness import HOSTILE

pytestmark = pytest.mark.native

DTYPES = ("float32", "bfloat16")


def tables(dtype: str) -> tuple[NativeOps, OpTable]:
    spec = DecoderSpec(model=HOSTILE, dtype=jnp.dtype(dtype).type, page_size=16)
    return NativeOps(spec), OpTable(spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 88])
def test_attention_over_an_image_is_the_references_in_any_blocks(dtype: str, size: int) -> None:
    check_attention(*tables(dtype), EncoderShape(num_heads=2, head_dim=size, scale=0.1), 530)


def test_attention_keeps_to_bounds_as_the_reference_does() -> None:
    first = np.arange(150) // 64 * 64
    bounds = np.stack([first, np.minimum(first + 64, 150)], axis=1).astype(np.int32)
    shape = EncoderShape(num_heads=3, head_dim=8, scale=0.3)
    check_attention(*tables("float32"), shape, 150, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations_are_the_references(dtype: str) -> None:
    check_elements(*tables(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_images_have_the_references_bits(dtype: str) -> None:
    check_image_rows(*tables(dtype))
