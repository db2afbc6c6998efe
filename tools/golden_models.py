"""The models of the golden corpus, and images for those that see: made of integers alone.

Owns what random numbers become: weights of the tiny shapes, blocks of GGUF's types, codes in MXFP4
and float8. Invariant: every byte that decides a stream is the same with every version of numpy.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.gguf.reader import TENSOR_TYPES
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import (
    NoiseSource,
    Shape,
    read_shape,
    write_drawn_checkpoint,
)
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.declaration import declare
from cadenza.weights.safetensors_file import NewTensor, Part, write_shards
from cadenza.weights.weight_format import FORMAT_OF_NAME, StoredDType
from cadenza.weights.weights import open_weights

Bytes = npt.NDArray[np.uint8]
Tensors = dict[str, tuple[StoredDType, npt.NDArray[Any]]]  # what a file stores, by name

SEED = 7

# Of the sum of four uniform numbers of 16 bits.
_MEAN_OF_SUM = 2 * 65_535
_DEVIATION_OF_SUM = 37_837.23


def open_model(shape: str, stored: str | None, folder: Path) -> Checkpoint:
    """The model of a tiny shape, written into an empty folder: in float32, or as `STORED` does."""
    if stored is None:
        _write_drawn(read_shape(shape), folder / "model")
        return open_checkpoint(folder / "model")
    return open_checkpoint(STORED[stored](read_shape(shape), folder))


def random_bytes(name: str, count: int) -> Bytes:
    """So many bytes, which follow from the name."""
    words = np.frombuffer(name.encode().ljust(-(-len(name) // 4) * 4), dtype="<u4")
    generator = np.random.Philox(np.random.SeedSequence([SEED, *words]))
    drawn = np.asarray(generator.random_raw(-(-count // 8)), dtype="<u8")
    return drawn.view(np.uint8)[:count]


def _write_drawn(shape: Shape, folder: Path) -> None:
    source = NoiseSource(seed=SEED, draw=_even_noise)
    write_drawn_checkpoint(shape, folder, source, dtype="float32")


def _even_noise(generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """Sums of four uniform integers, which only exact operations turn into floats."""
    words = np.asarray(generator.bit_generator.random_raw(count), np.uint64)
    parts = [(words >> np.uint64(16 * place)) & np.uint64(0xFFFF) for place in range(4)]
    total = np.asarray(np.sum(parts, axis=0, dtype=np.int64) - _MEAN_OF_SUM, np.float32)
    return np.divide(total, np.float32(_DEVIATION_OF_SUM), dtype=np.float32)


# Folders with some tensors in another form


def _write_float8(shape: Shape, folder: Path) -> Path:
    """Linears in float8_e4m3 with a scale for each block of 128 x 128 elements."""
    tensors = _drawn_tensors(shape, folder / "plain")
    for spec in declare(shape.config):
        if spec.kind == "linear" and len(spec.shape) == 2:
            rows, columns = spec.shape
            codes = random_bytes(spec.name, rows * columns).reshape(rows, columns)
            # From 2^-3 to nearly 2^3, of both signs.
            exponents = (4 + (codes >> 3 & 15) % 6) << 3
            own = (codes & 0x87 | exponents).view(FORMAT_OF_NAME["float8_e4m3"].numpy)
            blocks = -(-rows // 128), -(-columns // 128)
            steps = random_bytes(f"scales of {spec.name}", blocks[0] * blocks[1]).reshape(blocks)
            scales = (16 + steps % 16).astype(np.float32) * np.float32(2.0**-10)
            tensors[spec.name] = ("float8_e4m3", own)
            tensors[f"{spec.name}_scale_inv"] = ("float32", scales)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return _write_folder(folder, tensors, method)


def _write_mxfp4(shape: Shape, folder: Path) -> Path:
    """Experts in MXFP4, as gpt-oss stores them."""
    tensors = _drawn_tensors(shape, folder / "plain")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        if ".experts." not in name:
            continue
        count, num_in, num_out = tensors.pop(name)[1].shape
        groups = count, num_out, num_in // 32
        codes = random_bytes(name, 16 * count * num_out * groups[2]).reshape(*groups, 16)
        exponents = 120 + random_bytes(f"scales of {name}", codes.size // 16).reshape(groups) % 3
        tensors[f"{name}_blocks"] = ("uint8", codes)
        tensors[f"{name}_scales"] = ("uint8", exponents.astype(np.uint8))
    return _write_folder(folder, tensors, {"quant_method": "mxfp4"})


def _drawn_tensors(shape: Shape, folder: Path) -> Tensors:
    _write_drawn(shape, folder)
    weights = open_weights(folder)
    return {name: ("float32", np.asarray(weights[name])) for name in weights}


def _write_folder(path: Path, tensors: Tensors, method: Mapping[str, object]) -> Path:
    """The settings are those in `plain`."""
    folder = path / "model"
    folder.mkdir()
    parts = [
        Part(
            tensors=(NewTensor(name=name, dtype=dtype, shape=array.shape),),
            make=lambda array=array: [array],
        )
        for name, (dtype, array) in tensors.items()
    ]
    write_shards(folder, parts)
    settings = json.loads((path / "plain" / CONFIG_FILE).read_bytes())
    settings["quantization_config"] = method
    (folder / CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
    return folder


# GGUF

_GGUF_WIDTH = 256
_GGUF_HEADS, _GGUF_KV_HEADS, _GGUF_HEAD_DIM = 4, 2, 64
_GGUF_LAYERS = 3
_GGUF_VOCAB = 331

_GGUF_TYPES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K MXFP4 F16 BF16".split()

# Where a block has the float16 that its scales are multiplied by, and about how large it is.
_UNITS: Mapping[str, tuple[int, float]] = {
    "Q8_0": (0, 1 / 1024),
    "Q4_0": (0, 1 / 64),
    "Q4_1": (0, 1 / 64),
    "Q5_0": (0, 1 / 128),
    "Q5_1": (0, 1 / 128),
    "Q4_K": (0, 1 / 4096),
    "Q5_K": (0, 1 / 8192),
    "Q6_K": (208, 1 / 16384),
}

# What the float16 behind it is, as a multiple, so that elements are about 0; minimums of nested
# scales are subtracted.
_OFFSETS: Mapping[str, float] = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}

_LAYER = {
    "attn_q": (_GGUF_HEADS * _GGUF_HEAD_DIM, _GGUF_WIDTH),
    "attn_k": (_GGUF_KV_HEADS * _GGUF_HEAD_DIM, _GGUF_WIDTH),
    "attn_v": (_GGUF_KV_HEADS * _GGUF_HEAD_DIM, _GGUF_WIDTH),
    "attn_output": (_GGUF_WIDTH, _GGUF_HEADS * _GGUF_HEAD_DIM),
    "ffn_gate": (2 * _GGUF_WIDTH, _GGUF_WIDTH),
    "ffn_up": (2 * _GGUF_WIDTH, _GGUF_WIDTH),
    "ffn_down": (_GGUF_WIDTH, 2 * _GGUF_WIDTH),
}


def _write_gguf(model: Shape, folder: Path) -> Path:  # noqa: ARG001  a shape of its own
    """A Llama of blocks of 256 elements, whose matrices have every type that is read, in turns."""
    import gguf

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _gguf_settings().items():
        if isinstance(value, float):
            writer.add_float32(f"llama.{key}", value)
        else:
            writer.add_uint32(f"llama.{key}", value)
    for name, shape, kind in _gguf_tensors():
        code = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, _gguf_data(name, shape, kind), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_settings() -> dict[str, int | float]:
    return {
        "block_count": _GGUF_LAYERS,
        "context_length": 4096,
        "embedding_length": _GGUF_WIDTH,
        "feed_forward_length": 2 * _GGUF_WIDTH,
        "attention.head_count": _GGUF_HEADS,
        "attention.head_count_kv": _GGUF_KV_HEADS,
        "attention.key_length": _GGUF_HEAD_DIM,
        "attention.value_length": _GGUF_HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": _GGUF_HEAD_DIM,
        "vocab_size": _GGUF_VOCAB,
    }


def _gguf_tensors() -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types."""
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (_GGUF_VOCAB, _GGUF_WIDTH), "Q6_K"),
        ("output.weight", (_GGUF_VOCAB, _GGUF_WIDTH), "Q4_K"),
        ("output_norm.weight", (_GGUF_WIDTH,), "F32"),
    ]
    matrices = [
        (f"blk.{layer}.{name}", _LAYER[name]) for layer in range(_GGUF_LAYERS) for name in _LAYER
    ]
    for index, (name, shape) in enumerate(matrices):
        found.append((f"{name}.weight", shape, _GGUF_TYPES[index % len(_GGUF_TYPES)]))
    for layer in range(_GGUF_LAYERS):
        found += [
            (f"blk.{layer}.{name}_norm.weight", (_GGUF_WIDTH,), "F32") for name in ("attn", "ffn")
        ]
    return found


def _gguf_data(name: str, shape: tuple[int, ...], kind: str) -> npt.NDArray[Any]:
    """As the file has it: whole blocks of bytes in the last axis, or floats."""
    *rows, columns = shape
    if kind in ("F32", "F16", "BF16"):
        eighths = random_bytes(name, int(np.prod(shape))).reshape(shape).astype(np.float32) - 128
        if kind == "F32":
            return 1 + eighths * np.float32(2.0**-9)
        floats = eighths * np.float32(2.0**-10)
        if kind == "F16":
            return floats.astype(np.float16)
        return floats.astype(FORMAT_OF_NAME["bfloat16"].numpy).view(np.uint8)
    block = next(each for each in TENSOR_TYPES.values() if each.name == kind)
    count = int(np.prod(shape)) // block.block_len
    stored = random_bytes(name, count * block.block_bytes).reshape(count, -1).copy()
    if kind == "MXFP4":
        stored[:, 0] = 120 + stored[:, 0] % 3
    else:
        place, unit = _UNITS[kind]
        # From one to one and a half, exactly.
        units = np.asarray(unit * (1 + stored[:, place].astype(np.float32) / 512), np.float32)
        stored[:, place : place + 2] = _half_bytes(units)
        if kind in _OFFSETS:
            stored[:, 2:4] = _half_bytes(np.asarray(units * _OFFSETS[kind], np.float32))
    return stored.reshape(*rows, columns // block.block_len * block.block_bytes)


def _half_bytes(values: npt.NDArray[np.float32]) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


# Writers of models in stored formats, which return the path to open.
STORED: Mapping[str, Callable[[Shape, Path], Path]] = {
    "gguf": _write_gguf,
    "mxfp4": _write_mxfp4,
    "float8": _write_float8,
}
