"""Writes a folder with quantised weights: compressed-tensors in `pack-quantized`, which vLLM and
transformers read, with the same bits as `--quantization` at load. Embedding and head stay floats,
as other readers expect, and so does the first layer beside int4, since not all readers of 4 bits
read 8; a setting of our own, which others ignore, says that they are rounded to int8 at load."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.folder import Checkpoint, OnProgress, copy_small_files, writing_folder
from cadenza.checkpoint.formats.methods import format_at_load, is_float_until_load
from cadenza.config import Quantization
from cadenza.errors import CheckpointError
from cadenza.json_object import read_json_object
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.declaration import declare
from cadenza.weights.quantised_weight import quantise_int4, quantise_int8
from cadenza.weights.safetensors_file import (
    DEFAULT_SHARD_BYTES,
    NewTensor,
    Part,
    write_shards,
)
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import GROUP, as_weight_dtype

_BITS = {"int8": 8, "int4": 4}


def write_quantised_folder(
    checkpoint: Checkpoint,
    out: Path,
    quantization: Quantization,
    *,
    on_progress: OnProgress = lambda _, __: None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes weights of `int8` or `int4` and the folder's small files into a new or empty folder.
    Raises CheckpointError if the checkpoint is quantised already or a GGUF file, or the folder is
    not empty or cannot be written."""
    if checkpoint.format == "gguf" or checkpoint.scheme is not None:
        stored = "a GGUF file" if checkpoint.scheme is None else f"as {checkpoint.scheme.name}"
        raise CheckpointError(
            f"the checkpoint is already stored {stored}; quantise a folder with float weights"
        )
    parts = _parts(checkpoint, quantization)
    total, written = sum(part.num_bytes for part in parts), 0

    def advance(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_progress(written, total)

    with writing_folder(out) as folder:
        copy_small_files(checkpoint.folder, folder)
        write_shards(folder, parts, max_shard_bytes=max_shard_bytes, on_written=advance)
        _write_config(checkpoint, folder, quantization)


def _parts(checkpoint: Checkpoint, quantization: Quantization) -> list[Part]:
    return [
        _linear(checkpoint, spec, _BITS[quantization])
        if spec.kind == "linear" and not is_float_until_load(spec, quantization)
        else _copied(checkpoint, spec)
        for spec in declare(checkpoint.config)
    ]


def _copied(checkpoint: Checkpoint, spec: TensorSpec) -> Part:
    dtype = as_weight_dtype(checkpoint.weights.stored_type(spec.name))
    assert dtype is not None, "checked by check_weights"
    tensor = NewTensor(name=spec.name, dtype=dtype, shape=spec.shape)
    return Part(tensors=(tensor,), make=lambda: iter([checkpoint.weights.array(spec.name)]))


def _linear(checkpoint: Checkpoint, spec: TensorSpec, bits: int) -> Part:
    rows, reduction = spec.shape
    module = spec.name.removesuffix(".weight")
    groups = -(-reduction // GROUP)
    words = -(-reduction * bits // 32)
    tensors = [
        NewTensor(name=f"{module}.weight_packed", dtype="int32", shape=(rows, words)),
        NewTensor(name=f"{module}.weight_scale", dtype="float16", shape=(rows, groups)),
        NewTensor(name=f"{module}.weight_shape", dtype="int64", shape=(2,)),
    ]
    if bits == 4:
        shape = (-(-rows * bits // 32), groups)
        tensors.append(NewTensor(name=f"{module}.weight_zero_point", dtype="int32", shape=shape))

    def make() -> Iterator[AnyArray]:
        quantise = quantise_int4 if bits == 4 else quantise_int8
        made = quantise(checkpoint.weights.array(spec.name))
        unsigned = made.codes.view(np.uint8)
        yield _packed(unsigned if bits == 4 else unsigned ^ np.uint8(128), bits)
        yield made.scales
        yield np.array(spec.shape, np.int64)
        if made.zero_points is not None:
            yield _packed(np.ascontiguousarray(made.zero_points.T), bits).T

    return Part(tensors=tuple(tensors), make=make)


def _packed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Codes [R, C] in words of 32 bits, lowest bits first, padded with zeros."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(padded).view("<i4")


def _write_config(checkpoint: Checkpoint, folder: Path, quantization: Quantization) -> None:
    values = dict(read_json_object(checkpoint.folder / CONFIG_FILE).values)
    ignored = [
        spec.name.removesuffix(".weight")
        for spec in declare(checkpoint.config)
        if spec.kind == "router" or is_float_until_load(spec, quantization)
    ]
    bits = _BITS[quantization]
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": bits == 8,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", *ignored],
    }
    values |= format_at_load(quantization)
    text = json.dumps(values, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
