"""Weights that do not fit the memory: the refusal says how large they may be."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.backends.base import BackendTraits, ModelMemory
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.plan import make_plan
from tests.checkpoint.gguf_models import ARCHITECTURES, convert_config, tiny_config

GIB = 1 << 30


def planned(weight_bytes: int, checkpoint: Checkpoint | None = None) -> EnginePlan:
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
    checkpoint = checkpoint or open_checkpoint(None)
    return make_plan(EngineConfig(max_num_seqs=4), checkpoint, traits, GIB)


def test_weights_that_do_not_fit_are_refused_with_the_size_that_would():
    said = r"weights need 2,048.0 MiB .*; free .* a file with fewer bits whose weights take at most"
    with pytest.raises(ConfigError, match=said) as refused:
        planned(2 * GIB)
    (most,) = re.findall(r"at most (\S+) MiB$", str(refused.value))
    fitting = int(float(most.replace(",", "")) * (1 << 20))
    assert GIB * 0.95 < planned(fitting).weight_bytes < GIB


def test_weights_of_a_gguf_file_are_named_by_the_files_own_type(tmp_path: Path):
    config = replace(tiny_config("llama"), hidden_size=128, num_heads=2, head_dim=64)
    rope = replace(config.rope, rotary_dim=64)
    config = replace(config, num_kv_heads=2, intermediate_size=128, rope=rope)
    model = convert_config(ARCHITECTURES["llama"], config, tmp_path / "original")
    model.kind = "Q4_0"
    small = planned(GIB // 4, open_checkpoint(model.write(tmp_path / "model.gguf")))
    with pytest.raises(ConfigError) as refused:
        planned(2 * GIB, open_checkpoint(tmp_path / "model.gguf"))
    assert str(refused.value).startswith("the weights need 2,048.0 MiB as Q4_0, ")
    assert small.dtype not in str(refused.value)
    assert "256.0 MiB of Q4_0 weights, " in small.summary
    with pytest.raises(ConfigError, match=r"the weights need 2,048\.0 MiB as bfloat16, "):
        planned(2 * GIB)
