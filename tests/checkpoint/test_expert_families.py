"""Mixtures of experts: what their files say, which tensors that calls for, and what is refused."""

from typing import Any

import pytest

from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import declare, declare_layer
from cadenza.models.model_config import ExpertNames, ExpertsConfig, ModelConfig
from cadenza.weights.tensor_spec import ExpertMLPSpec, GatedMLPSpec

MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
SHARED: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def read(model_type: str, **changes: Any) -> ModelConfig:
    return parse_model_config({**SHARED, "model_type": model_type, **changes})


def experts_of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


def expert_layers(config: ModelConfig) -> list[bool]:
    return [kind.has_experts for kind in config.layer_kinds]


def test_silent_files_have_their_familys_experts():
    found = [experts_of(read(family)) for family in MIXTURES]
    assert [(each.num_experts, each.num_chosen) for each in found] == [(8, 2), (128, 8), (64, 8)]
    assert [each.intermediate_size for each in found] == [10, 768, 10]
    assert [each.over_chosen for each in found] == [True, False, False]
    assert [expert_layers(read(family)) for family in MIXTURES] == [[True] * 4] * 3


@pytest.mark.parametrize("family", MIXTURES)
def test_the_number_of_experts_has_two_names(family: str):
    one, other = read(family, num_experts=5), read(family, num_local_experts=5)
    assert one == other == read(family, num_experts=5, num_local_experts=5)
    assert experts_of(one).num_experts == 5
    with pytest.raises(CheckpointError, match=r"num_local_experts are 5 and 6; correct one"):
        read(family, num_experts=5, num_local_experts=6)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_norm_topk_prob_weighs_by_a_softmax_over_the_chosen(family: str):
    assert experts_of(read(family, norm_topk_prob=True)).over_chosen


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [0]}, [False, False, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
        ({"mlp_only_layers": None}, [True] * 4),
    ],
)
def test_qwen3_moe_has_layers_without_experts(changes: dict[str, Any], expected: list[bool]):
    config = read("qwen3_moe", **changes)
    assert expert_layers(config) == expected
    kinds = [type(declare_layer(config, index).mlp) for index in range(4)]
    assert kinds == [ExpertMLPSpec if has_experts else GatedMLPSpec for has_experts in expected]


def test_qwen3_moe_has_a_window_in_every_layer_only_where_it_is_used():
    assert read("qwen3_moe", sliding_window=9).layer_pattern[0].window is None
    config = read("qwen3_moe", sliding_window=9, use_sliding_window=True, max_window_layers=2)
    assert [kind.window for kind in config.layer_kinds] == [9] * 4


def test_experts_are_declared_one_by_one_under_their_familys_names():
    shapes = {spec.name: spec.shape for spec in declare(read("mixtral"))}
    assert shapes["model.layers.3.block_sparse_moe.gate.weight"] == (8, 24)
    assert shapes["model.layers.3.block_sparse_moe.experts.7.w3.weight"] == (10, 24)
    assert shapes["model.layers.3.block_sparse_moe.experts.7.w2.weight"] == (24, 10)
    config = read("qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5)
    shapes = {spec.name: spec.shape for spec in declare(config)}
    assert shapes["model.layers.0.mlp.experts.2.up_proj.weight"] == (5, 24)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" not in shapes
    assert experts_of(read("olmoe")).names == ExpertNames()


def test_olmoe_norms_all_heads_together_before_the_layers_mlp():
    shapes = {spec.name: spec.shape for spec in declare(read("olmoe"))}
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (24,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (8,)
    assert "model.layers.0.input_layernorm.weight" in shapes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; it must be a whole number from 1"),
        ({"num_experts": 5000}, "num_experts is 5000"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5.* from 1 to 4"),
        (
            {"num_experts": 4096, "num_hidden_layers": 9},
            "are 36864 experts; supported are 32768 in total",
        ),
        ({"mlp_only_layers": [4]}, "mlp_only_layers names 4; supported are layers from 0 to 3"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers names True"),
        ({"mlp_only_layers": [[]]}, "mlp_only_layers names a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        read("qwen3_moe", **changes)
