"""Weights that do not fit the memory: the refusal says how large they may be."""

import re

import pytest

from cadenza.backends.base import BackendTraits, ModelMemory
from cadenza.checkpoint import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.plan import EnginePlan, make_plan

GIB = 1 << 30


def planned(weight_bytes: int) -> EnginePlan:
    memory = ModelMemory(
        weight_bytes=weight_bytes, kv_bytes_per_token=100, row_bytes=2_000, scratch_bytes=5_000
    )
    traits = BackendTraits(
        name="test:cpu",
        ops="native",
        exactness="bitwise",
        dtypes=("float32", "bfloat16"),
        dtype_for={"bfloat16": "bfloat16", "float32": "float32"},
        max_num_batched_tokens=48,
        device_memory_bytes=GIB,
        default_max_model_len=96,
        kv_layouts=("dense",),
        memory={"bfloat16": memory, "float32": memory},
    )
    return make_plan(EngineConfig(max_num_seqs=4), open_checkpoint(None), traits, GIB)


def test_weights_that_do_not_fit_are_refused_with_the_size_that_would():
    said = r"weights need 2,048.0 MiB .*; free .* a file with fewer bits whose weights take at most"
    with pytest.raises(ConfigError, match=said) as refused:
        planned(2 * GIB)
    (most,) = re.findall(r"at most (\S+) MiB$", str(refused.value))
    fitting = int(float(most.replace(",", "")) * (1 << 20))
    assert GIB * 0.95 < planned(fitting).weight_bytes < GIB
