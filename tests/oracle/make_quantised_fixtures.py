"""Writes tests/checkpoint/quantised_by_others with the libraries that write such checkpoints.

Run once, with torch 2.13.0, compressed-tensors 0.20.0, mlx 0.32.4 and safetensors, and with the
unpacked source distributions of autoawq 0.2.9 and gptqmodel 7.7.0, which do not install on a CPU;
of these the packing functions alone are executed:

    pip download --no-deps --no-binary :all: autoawq==0.2.9 gptqmodel==7.7.0
    python tests/oracle/make_quantised_fixtures.py \
        --autoawq autoawq-0.2.9 --gptqmodel gptqmodel-7.7.0

Each fixture is one module [N, K] with the tensors that the library stores, the settings in
config.json, and `expected` [N, K], which the library dequantises with its scales as float32.
"""

import argparse
import ast
import importlib.util
import json
import math
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "checkpoint" / "quantised_by_others"
MODULE = "model.layers.0.mlp.up_proj"
ROWS = 16
REDUCTION = 128


def weight(reduction: int, seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, reduction, generator=torch.Generator().manual_seed(seed)) + 0.1


def groups_of(values: torch.Tensor, group: int | None) -> torch.Tensor:
    """[N, K] as [N, S, elements]."""
    return values.reshape(len(values), -1, group or values.shape[1])


def chosen(values: torch.Tensor, bits: int, group: int | None, *, symmetric: bool) -> Any:
    """Scales and zero points of signed codes [N, S], by the range of each group."""
    each = groups_of(values, group)
    low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
    if symmetric:
        largest = torch.maximum(-low, high)
        return largest / (2 ** (bits - 1) - 1), torch.zeros_like(largest).to(torch.int8)
    scales = (high - low) / (2**bits - 1)
    zeros = torch.round(-(2 ** (bits - 1)) - low / scales)
    return scales, zeros.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)


def write(
    name: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    expected: torch.Tensor,
) -> None:
    stored = {f"{MODULE}.{key}": each.contiguous() for key, each in tensors.items()}
    stored["expected"] = expected.float().contiguous()
    save_file(stored, str(FOLDER / f"{name}.safetensors"))
    (FOLDER / f"{name}.json").write_text(json.dumps(settings, indent=1) + "\n")


def write_compressed(
    name: str, layout: str, args: Mapping[str, Any], dtype: torch.dtype, reduction: int = REDUCTION
) -> None:
    compressor = (
        NaiveQuantizationCompressor if layout == "int-quantized" else PackedQuantizationCompressor
    )
    own = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=own)
    values = weight(reduction, len(name))
    if own.strategy == "tensor":
        scales, zeros = values.abs().max().reshape(1) / 127, torch.zeros(1, dtype=torch.int8)
    else:
        scales, zeros = chosen(values, own.num_bits, own.group_size, symmetric=own.symmetric)
    state = {
        "weight": values.to(dtype),
        "weight_scale": scales.to(dtype),
        "weight_zero_point": zeros,
    }
    stored = compressor.compress(state, scheme)
    wide = {**stored, "weight_scale": stored["weight_scale"].float()}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    write(
        name,
        {"quantization_config": settings},
        stored,
        compressor.decompress(wide, scheme)["weight"],
    )


def write_compressed_mxfp4(name: str) -> None:
    own = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        symmetric=True,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=own)
    values = weight(REDUCTION, 5)
    scales = torch.exp2(torch.floor(torch.log2(groups_of(values, 32).abs().amax(-1))) - 2)
    state = {"weight": values.bfloat16(), "weight_scale": scales.bfloat16()}
    stored = MXFP4PackedCompressor.compress(state, scheme)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    expected = MXFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]
    write(name, {"quantization_config": settings}, stored, expected)


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def method_of(source: Path, name: str, **names: Any) -> Callable[..., Any]:
    """A function of a module that cannot be imported here, with the given globals."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    function = [each for each in functions if each.name == name][-1]
    function.decorator_list, function.returns = [], None
    for each in (*function.args.args, *function.args.kwonlyargs):
        each.annotation = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "extracted.py"
        path.write_text(ast.unparse(function), encoding="utf-8")
        module = load(path)
    module.__dict__.update(names)
    return getattr(module, name)


def write_awq(name: str, sdist: Path, group: int) -> None:
    gemm = sdist / "awq" / "modules" / "linear" / "gemm.py"
    packing = sdist / "awq" / "utils" / "packing_utils.py"
    pack = method_of(gemm, "from_linear", torch=torch, get_best_device=lambda: "cpu")
    rows = 32  # the library's packing needs a multiple of it
    linear = torch.nn.Linear(REDUCTION, rows, bias=False)
    linear.weight.data = weight(REDUCTION, group, rows)
    scales, zeros = chosen(linear.weight.data, 4, group, symmetric=False)
    scales = scales.half().float()
    points = (zeros.float() + 8).T.contiguous()  # [S, N]
    linear.weight.data = linear.weight.data.clamp(
        (-points.T * scales).repeat_interleave(group, 1),
        ((15 - points.T) * scales).repeat_interleave(group, 1),
    )

    def make(w_bit: int, group_size: int, *_: Any) -> Any:
        return types.SimpleNamespace(w_bit=w_bit, group_size=group_size, in_features=REDUCTION)

    made = pack(make, linear, 4, group, scales=scales.T.contiguous(), zeros=points)
    stored = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales")}
    expected = load(packing).dequantize_gemm(
        made.qweight, made.qzeros, made.scales.float(), 4, group
    )
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    write(name, {"quantization_config": {**settings, "version": "gemm"}}, stored, expected.T)


def write_gptq(name: str, sdist: Path, config: Mapping[str, Any]) -> None:
    source = sdist / "gptqmodel" / "nn_modules" / "qlinear" / "__init__.py"
    limits = types.SimpleNamespace(threadpool_limits=lambda _: torch.no_grad())
    names = {
        "torch": torch,
        "t": torch,
        "np": np,
        "math": math,
        "nn": torch.nn,
        "THREADPOOLCTL": limits,
        "_ConvNd": torch.nn.Conv2d,
        "transformers": types.SimpleNamespace(
            pytorch_utils=types.SimpleNamespace(Conv1D=torch.nn.Conv1d)
        ),
        "_torch_right_shift": torch.bitwise_right_shift,
    }
    pack = method_of(source, "pack_original", **names)
    dequantise = method_of(source, "dequantize_weight", **names)
    from_codes = method_of(source, "_dequantize_from_codes", **names)
    bits, group, reduction = config["bits"], config["group_size"], REDUCTION
    linear = torch.nn.Linear(reduction, ROWS, bias=False)
    values = weight(reduction, bits + len(name))
    order = torch.randperm(reduction, generator=torch.Generator().manual_seed(7))
    order = order if config["desc_act"] else torch.arange(reduction)
    groups = torch.empty(reduction, dtype=torch.int32)
    groups[order] = (torch.arange(reduction) // (group if group > 0 else reduction)).int()
    wanted = None if group < 0 else group
    scales, zeros = chosen(values[:, order], bits, wanted, symmetric=config["sym"])
    scales, points = scales.half().float(), zeros.float() + 2 ** (bits - 1)
    linear.weight.data = values
    held = types.SimpleNamespace(
        bits=bits,
        maxq=2**bits - 1,
        pack_dtype_bits=32,
        pack_factor=32 // bits,
        planar=False,
        pack_np_math_dtype=np.uint32,
        pack_np_dtype=np.int32,
        dequant_dtype=torch.int16 if bits == 8 else torch.int8,
        in_features=reduction,
        bias=None,
        _init_wf_unsqueeze_buffers=lambda: None,
    )
    held.register_buffer = lambda key, value: setattr(held, key, value)
    held._dequantize_from_codes = lambda *each, **more: from_codes(held, *each, **more)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None]
    held.wf_unsqueeze_zero, held.wf_unsqueeze_neg_one = shifts[None], shifts[..., None]
    pack(held, linear, scales, points.int(), groups)
    stored = {key: getattr(held, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    stored = {key: each.clone() for key, each in stored.items()}
    held.scales = held.scales.float()
    expected = dequantise(held).T
    if config["checkpoint_format"] == "gptq":  # as convert_gptq_v2_to_v1_format_module does
        stored["qzeros"] -= {4: 0x11111111, 8: 0x01010101}[bits]
    write(name, {"quantization_config": {"quant_method": "gptq", **config}}, stored, expected)


def write_mlx(name: str, dtype: Any, **settings: Any) -> None:
    values = mx.array(weight(REDUCTION, len(name)).numpy()).astype(dtype)
    made = mx.quantize(values, **settings)
    keys = ("weight", "scales", "biases")[: len(made)]
    stored = dict(zip(keys, made, strict=True))
    wide = [
        each.astype(mx.float32) if key != "weight" and len(made) == 3 else each
        for key, each in stored.items()
    ]
    expected = mx.dequantize(*wide, **settings, **({} if len(made) == 3 else {"dtype": mx.float32}))
    FOLDER.mkdir(exist_ok=True, parents=True)
    arrays = {f"{MODULE}.{key}": each for key, each in stored.items()}
    arrays["expected"] = expected.astype(mx.float32)
    mx.save_safetensors(str(FOLDER / f"{name}.safetensors"), arrays)
    (FOLDER / f"{name}.json").write_text(json.dumps({"quantization": settings}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--autoawq", type=Path, required=True)
    parser.add_argument("--gptqmodel", type=Path, required=True)
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True, parents=True)
    group = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    write_compressed("ct-int4-g32", "pack-quantized", group, torch.bfloat16)
    uneven = {**group, "group_size": 128, "symmetric": False}
    write_compressed("ct-int4-g128-asymmetric", "pack-quantized", uneven, torch.float16, 256)
    channel = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    write_compressed("ct-int8-channel-packed", "pack-quantized", channel, torch.bfloat16)
    write_compressed("ct-int8-channel", "int-quantized", channel, torch.bfloat16)
    uneven = {**channel, "symmetric": False}
    write_compressed("ct-int8-channel-asymmetric", "int-quantized", uneven, torch.bfloat16)
    write_compressed(
        "ct-int8-tensor", "int-quantized", {**channel, "strategy": "tensor"}, torch.float16
    )
    write_compressed_mxfp4("ct-mxfp4")
    write_awq("awq-g64", given.autoawq, 64)
    plain = {
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    write_gptq("gptq-int4-v1", given.gptqmodel, plain)
    write_gptq("gptq-int4-v1-asymmetric", given.gptqmodel, {**plain, "sym": False})
    second = {**plain, "checkpoint_format": "gptq_v2", "sym": False}
    write_gptq("gptq-int4-v2-asymmetric", given.gptqmodel, second)
    write_gptq("gptq-int8-v1-channel", given.gptqmodel, {**plain, "bits": 8, "group_size": -1})
    write_gptq("gptq-int8-v2-asymmetric", given.gptqmodel, {**second, "bits": 8})
    write_gptq("gptq-int4-desc-act", given.gptqmodel, {**plain, "desc_act": True})
    write_mlx("mlx-int4-g64", mx.bfloat16, group_size=64, bits=4, mode="affine")
    write_mlx("mlx-int4-g32", mx.float16, group_size=32, bits=4, mode="affine")
    write_mlx("mlx-int8-g128", mx.bfloat16, group_size=128, bits=8, mode="affine")
    write_mlx("mlx-mxfp4", mx.bfloat16, group_size=32, bits=4, mode="mxfp4")


if __name__ == "__main__":
    main()
