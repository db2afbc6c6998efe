"""The order in which linears are loaded: files of packed weights of the same version rely on it."""

import re
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.decoder import load_decoder
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.declaration import declare
from tests.checkpoint.config_writer import write_random_checkpoint

BLOCK = re.compile(r"(self_attn|mlp|linear_attn|conv|mamba|feed_forward|shared_mlp)\.")
EXPERTS = "experts.0.gate_proj experts.0.up_proj experts.0.down_proj"


@pytest.mark.parametrize(
    ("shape", "layer", "expected"),
    [
        ("tiny-llama", 0, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (
            "tiny-deepseek-v3",
            3,
            f"q_a_proj kv_b_proj q_b_proj kv_a_proj_with_mqa o_proj {EXPERTS} gate "
            f"shared_experts.gate_proj shared_experts.up_proj shared_experts.down_proj",
        ),
        (
            "tiny-qwen3.5-moe",
            0,
            f"in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj {EXPERTS} gate "
            f"shared_expert.gate_proj shared_expert.up_proj shared_expert_gate "
            f"shared_expert.down_proj",
        ),
        (
            "tiny-gemma4-moe",
            0,
            f"q_proj k_proj v_proj o_proj {EXPERTS} gate_proj up_proj down_proj router.proj",
        ),
        ("tiny-lfm2", 0, "in_proj out_proj w1 w3 w2"),
        ("tiny-granite4", 0, "in_proj out_proj input_linear output_linear"),
    ],
)
def test_linears_are_loaded_in_one_order(shape: str, layer: int, expected: str, tmp_path: Path):
    config = named_shape(shape)
    write_random_checkpoint(config, tmp_path, seed=0, dtype="float32")
    read: list[str] = []
    weights = open_checkpoint(tmp_path).weights.watched(read.append)
    spec = DecoderSpec(model=config, dtype=np.dtype("float32"), page_size=16)
    load_decoder(WeightSource(OpTable(spec), spec, weights), max_model_len=64)
    linears = {each.name for each in declare(config) if each.kind in ("linear", "router")}
    prefix = f"model.layers.{layer}."
    own = [each for each in dict.fromkeys(read) if each in linears and each.startswith(prefix)]
    names = [each.removesuffix(".weight").removeprefix(prefix) for each in own]
    first = (each for each in names if re.search(r"\bexperts\.[^0]", each) is None)
    assert " ".join(BLOCK.sub("", each) for each in first) == expected
