"""Writers of each method, from random codes, for models that are run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cadenza.weights.tensor_spec import TensorSpec
from tests.checkpoint.quantised_folders import Store, packed

ALIGNED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "dtype": "float32",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""All inputs are multiples of 64."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _linear(spec: TensorSpec) -> bool:
    return spec.kind == "linear"


def _affine(weight: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, ...]:
    """Unsigned codes [N, K], and scales and minimums [N, S] in float16."""
    each = weight.reshape(len(weight), -1, group)
    low = each.min(-1)
    scales = ((each.max(-1) - low) / (2**bits - 1)).astype(np.float16)
    codes = np.rint((each - low[..., None]) / scales[..., None].astype(np.float32))
    return codes.clip(0, 2**bits - 1).reshape(weight.shape), scales, low.astype(np.float16)


def _zeros(scales: np.ndarray, low: np.ndarray, bits: int) -> np.ndarray:
    return np.rint(-low.astype(np.float32) / scales.astype(np.float32)).clip(0, 2**bits - 1)


def awq(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
    if not _linear(spec):
        return None
    codes, scales, low = _affine(weight, 4, 64)

    def words(columns: np.ndarray) -> np.ndarray:  # [., N]
        eights = columns.reshape(len(columns), -1, 8)[..., AWQ_ORDER]
        return packed(eights.reshape(len(columns), -1), 4)

    zeros = _zeros(scales, low, 4)
    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.copy()}


def gptq(bits: int) -> Store:
    def store(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
        if not _linear(spec):
            return None
        codes, scales, low = _affine(weight, bits, 64)
        zeros = _zeros(scales, low, bits).T
        return {
            "qweight": packed(codes, bits).T.copy(),
            "qzeros": packed(zeros, bits),
            "scales": scales.T.copy(),
            "g_idx": (np.arange(weight.shape[1]) // 64).astype(np.int32),
        }

    return store


def gptq_ordered(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
    """4 bits in groups of 32, whose inputs are in an order that follows from their number."""
    return _in_order(weight, weight.shape[1]) if _linear(spec) else None


def gptq_in_many_orders(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
    """The same with an order of its own for each linear."""
    return _in_order(weight, len(spec.name) + len(weight)) if _linear(spec) else None


def _in_order(weight: np.ndarray, seed: int) -> Mapping[str, np.ndarray]:
    num_inputs = weight.shape[1]
    order = np.random.default_rng(seed).permutation(num_inputs)
    codes, scales, low = _affine(weight[:, order], 4, 32)
    groups = np.empty(num_inputs, np.int32)
    groups[order] = np.arange(num_inputs) // 32
    return {
        "qweight": packed(codes[:, np.argsort(order)], 4).T.copy(),
        "qzeros": packed(_zeros(scales, low, 4).T, 4),
        "scales": scales.T.copy(),
        "g_idx": groups,
    }


def mlx(bits: int) -> Store:
    def store(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
        del spec  # embedding and head too
        codes, scales, low = _affine(weight, bits, 64)
        return {"weight": packed(codes, bits).view(np.uint32), "scales": scales, "biases": low}

    return store


def mxfp4(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
    if not _linear(spec):
        return None
    random = np.random.default_rng(weight.size)
    shape = (len(weight), weight.shape[1] // 32)
    return {
        "weight": packed(random.integers(0, 16, weight.shape), 4).view(np.uint32),
        "scales": random.integers(122, 125, shape).astype(np.uint8),
    }


def compressed(bits: int) -> Store:
    def store(spec: TensorSpec, weight: np.ndarray) -> Mapping[str, np.ndarray] | None:
        if not _linear(spec):
            return None
        codes, scales, low = _affine(weight, bits, 64)
        return {
            "weight_packed": packed(codes, bits),
            "weight_shape": np.array(spec.shape, np.int64),
            "weight_scale": scales,
            "weight_zero_point": packed(_zeros(scales, low, bits).T, bits).T.copy(),
        }

    return store


def _compressed_settings(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": 64, "symmetric": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_GPTQ = {"quant_method": "gptq", "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}

ORDERED = {"quantization_config": {**_GPTQ, "bits": 4, "group_size": 32, "desc_act": True}}

METHODS: dict[str, tuple[dict[str, Any], Store]] = {
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}, awq),
    "gptq-4": ({"quantization_config": {**_GPTQ, "bits": 4}}, gptq(4)),
    "gptq-4-ordered": (ORDERED, gptq_ordered),
    "gptq-8": ({"quantization_config": {**_GPTQ, "bits": 8}}, gptq(8)),
    "mlx-4": ({"quantization": {"group_size": 64, "bits": 4}}, mlx(4)),
    "mlx-8": ({"quantization": {"group_size": 64, "bits": 8}}, mlx(8)),
    "mlx-mxfp4": ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, mxfp4),
    "compressed-4": ({"quantization_config": _compressed_settings(4)}, compressed(4)),
    "compressed-8": ({"quantization_config": _compressed_settings(8)}, compressed(8)),
}
