"""Which kernels `--arithmetic` and the formats choose, and the name of their class."""

from pathlib import Path

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.tables import name_class, takes_portable_kernels
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.build import plan_model
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.harness import BASE

BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (BF16, False),
        ({**BF16, "arithmetic": "portable"}, True),
        ({**BF16, "quantization": "int8"}, False),
        ({**BF16, "kv_cache_dtype": "int8"}, False),
        ({**BF16, "quantization": "int4", "kv_cache_dtype": "int8"}, True),
    ],
)
def test_codes_in_weights_and_kv_take_the_portable_kernels(
    tmp_path: Path, options: dict[str, str], expected: bool
):
    """Also in a mixture, whose routers are not quantised."""
    write_random_checkpoint(named_shape("tiny-mixtral"), tmp_path, seed=1, dtype="float32")
    checkpoint = open_checkpoint(tmp_path)
    asked = RunnerSetup(limits=BASE.limits, **options)  # pyright: ignore[reportArgumentType]
    assert takes_portable_kernels(checkpoint.config, checkpoint.weights, asked) is expected


@pytest.mark.parametrize(
    ("isa", "is_portable", "dtype", "expected"),
    [
        ("avx512_bf16", False, "bfloat16", "avx512_bf16"),
        ("avx512_bf16", True, "bfloat16", "portable"),
        ("avx512_bf16", False, "float32", "portable"),
        ("avx512", False, "bfloat16", "portable"),
        ("amx", False, "bfloat16", "amx"),
        ("amx", True, "bfloat16", "portable"),
        ("amx_emulated", False, "bfloat16", "amx"),
    ],
)
def test_only_products_of_bfloat16_by_bf16_instructions_are_another_class(
    isa: str, is_portable: bool, dtype: str, expected: str
):
    assert name_class(isa, "avx512", is_portable=is_portable, dtype=dtype) == expected


def test_the_plain_operations_refuse_portable_arithmetic():
    config = EngineConfig(ops="reference", arithmetic="portable")
    with pytest.raises(ConfigError, match="--arithmetic portable is not one of fast on xla:cpu"):
        plan_model(open_checkpoint(None), config)
