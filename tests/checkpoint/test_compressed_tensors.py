"""compressed-tensors folders: which modules are quantised, and what their codes mean."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.backends import BACKENDS
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import describe_backend
from cadenza.loading.plan import make_plan
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.tensor_spec import TensorSpec
from tests.checkpoint.quantised_folders import packed, write_quantised

IGNORED = ["lm_head", "re:.*mlp\\.gate$", "model.layers.0.self_attn.o_proj"]


def settings(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": IGNORED,
        }
    }


def is_quantised(spec: TensorSpec) -> bool:
    module = spec.name.removesuffix(".weight")
    others = (
        spec.kind in ("embedding", "head", "router"),
        module.endswith("layers.0.self_attn.o_proj"),
    )
    return not any(others)


class Writer:
    """Stores random codes, and remembers the elements [N, K] that they mean."""

    def __init__(self, bits: int, group: int | None, *, layout: str, has_zeros: bool) -> None:
        self.bits, self.group, self.layout, self.has_zeros = bits, group, layout, has_zeros
        self.meant: dict[str, np.ndarray] = {}

    def __call__(self, spec: TensorSpec, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if not is_quantised(spec):
            return None
        rows, reduction = spec.shape
        random = np.random.default_rng(len(self.meant))
        low = -(1 << (self.bits - 1))
        group = self.group or reduction
        groups = -(-reduction // group)
        codes = random.integers(low, -low, spec.shape)
        scales = random.uniform(1e-3, 4e-3, (rows, groups)).astype(np.float16)
        zeros = random.integers(low, -low, (rows, groups)) * int(self.has_zeros)
        wide = [np.repeat(each, group, axis=1)[:, :reduction] for each in (zeros, scales)]
        self.meant[spec.name] = (codes - wide[0]).astype(np.float32) * wide[1].astype(np.float32)
        if self.layout == "pack-quantized":
            stored = {
                "weight_packed": packed(codes - low, self.bits),
                "weight_shape": np.array(spec.shape, np.int64),
                "weight_scale": scales,
            }
            zero_points = packed((zeros - low).T, self.bits).T.copy()
        else:
            stored = {"weight": codes.astype(np.int8), "weight_scale": scales}
            zero_points = zeros.astype(np.int8)
        return stored | ({"weight_zero_point": zero_points} if self.has_zeros else {})


CASES = {
    "4 bits in groups of 32": ("pack-quantized", 4, 32, False),
    "4 bits in groups of 64 with zero points": ("pack-quantized", 4, 64, True),
    "4 bits in channels": ("pack-quantized", 4, None, False),
    "4 bits in channels with zero points": ("pack-quantized", 4, None, True),
    "8 bits in groups of 128": ("pack-quantized", 8, 128, False),
    "8 bits in groups with zero points": ("pack-quantized", 8, 64, True),
    "8 bits in channels with zero points": ("int-quantized", 8, None, True),
    "8 bits in channels": ("int-quantized", 8, None, False),
    "8 bits in naive groups": ("naive-quantized", 8, 32, False),
}


CASES_OF_SHAPE = {"4 bits in groups of 64 with zero points": "tiny-qwen3-moe"}
"""A mixture has K of 96, 192, 168 and 40."""


def write(folder: Path, case: str, shape: str = "tiny-llama") -> tuple[Path, Writer]:
    layout, bits, group, has_zeros = CASES[case]
    writer = Writer(bits, group, layout=layout, has_zeros=has_zeros)
    strategy: dict[str, Any] = {"strategy": "channel"} if group is None else {"group_size": group}
    wanted = settings(layout, num_bits=bits, symmetric=not has_zeros, **strategy)
    return write_quantised(folder, shape, wanted, writer), writer


@pytest.mark.parametrize("case", CASES)
def test_codes_mean_what_the_writer_meant(tmp_path: Path, case: str):
    folder, writer = write(tmp_path, case, CASES_OF_SHAPE.get(case, "tiny-llama"))
    weights = open_checkpoint(folder).weights
    assert len(writer.meant) > 10
    for name, meant in writer.meant.items():
        found = weights[name]
        assert isinstance(found, QuantisedWeight)
        assert weights.shape(name) == found.shape
        assert found.format == weights.format(name)
        np.testing.assert_array_equal(found.dequantised(), meant)
    assert set(weights.quantised) == set(writer.meant)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "hqq"}, "--quantization int8 or int4"),
    "an unknown method": ({"quant_method": "x"}, "supported are compressed-tensors, awq, gptq"),
    "no groups": ({"config_groups": {}}, "config_groups"),
    "sparsity": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "rotations": ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    "scales of KV": ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "marlin": ({"format": "marlin-24"}, "format 'marlin-24'"),
    "a pattern that takes long": ({"ignore": ["re:(a+)+$"]}, "no repeated group"),
    "a pattern that is none": ({"ignore": ["re:["]}, "not a regular expression"),
}
OF_GROUP: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": ({"weights": {"num_bits": 3, "group_size": 32}}, "num_bits 3"),
    "groups of 48": ({"weights": {"num_bits": 4, "group_size": 48}}, "multiple of 32"),
    "ordered inputs": (
        {"weights": {"num_bits": 4, "group_size": 32, "actorder": "group"}},
        "actorder group",
    ),
    "static activations": ({"input_activations": {"num_bits": 8, "dynamic": False}}, "static"),
    "activations of 4 bits": ({"input_activations": {"num_bits": 4, "dynamic": True}}, "4 bits"),
    "float activations": (
        {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}},
        "float8 per tensor",
    ),
}


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small"), "4 bits in groups of 32", "tiny-llama")[0]


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_is_not_followed_is_refused_by_name(tmp_path: Path, small: Path, case: str):
    folder = Path(shutil.copytree(small, tmp_path / "model"))
    changes, message = REFUSED[case]
    changed(folder, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(folder)


@pytest.mark.parametrize("case", OF_GROUP)
def test_a_group_that_is_not_followed_is_refused_by_name(tmp_path: Path, small: Path, case: str):
    folder = Path(shutil.copytree(small, tmp_path / "model"))
    changes, message = OF_GROUP[case]
    weights = {"num_bits": 4, "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, **changes}
    changed(folder, config_groups={"group_0": group})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(folder)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, small: Path):
    folder = Path(shutil.copytree(small, tmp_path / "model"))
    changed(folder, ignore=[])
    with pytest.raises(CheckpointError, match=r"lack .*weight_packed"):
        open_checkpoint(folder)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64}}
    changed(folder, ignore=IGNORED, config_groups={"group_0": group})
    with pytest.raises(CheckpointError, match=r"weight_scale has shape .* requires"):
        open_checkpoint(folder)


def test_a_quantised_checkpoint_is_planned_with_its_own_bytes(tmp_path: Path):
    folder, _ = write(tmp_path, "4 bits in groups of 32")
    config = EngineConfig(max_model_len=64, max_num_seqs=2)
    checkpoint = open_checkpoint(folder)
    traits = describe_backend(config, checkpoint, BACKENDS)
    plain = make_plan(config, open_checkpoint(tmp_path / "plain"), traits, 1 << 30)
    planned = make_plan(config, checkpoint, traits, 1 << 30)
    assert planned.weight_bytes < 0.6 * plain.weight_bytes
    with pytest.raises(ConfigError, match=r"--quantization int8: .* compressed-tensors"):
        make_plan(EngineConfig(quantization="int8"), checkpoint, traits, 1 << 30)
