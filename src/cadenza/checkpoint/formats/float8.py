"""Reads float8_e4m3fn weights: the method `fp8`, and what compressed-tensors shares with it. A
weight, row or block has one scale, which is multiplied (also where it is called
`weight_scale_inv`). Weights are computed as stored; activations keep the model's type, so stored
scales of inputs are not used. Shapes: N out, K in."""

from functools import partial
from typing import Literal

import numpy as np

from cadenza.checkpoint.formats.scheme import SCALE_DTYPES, ModuleTensors, QuantisationScheme
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.quantised_weight import Float8Weight, scales_of_blocks
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import FLOAT8, FLOAT8_BLOCK, StoredDType
from cadenza.weights.weights import Weights

FLOAT8_TYPE: StoredDType = "float8_e4m3"
MAX_BLOCK = 1 << 20

# what has one scale: so many rows and elements of K, the weight, or a row
Block = tuple[int, int] | Literal["tensor", "channel"]

_BLOCK_SCALE = "weight_scale_inv"
# powers of two in a byte are exact in float32
_SCALE_DTYPES: tuple[StoredDType, ...] = (*SCALE_DTYPES, "float8_e8m0")

_INPUT_SCALES = ("input_scale", "activation_scale")
_ACTIVATIONS = {"dynamic": "float8 per token", "static": "float8 with one scale for each linear"}


def _find(block: tuple[int, int] | None, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
    """The stored type of a weight says whether it is quantised."""
    if spec.name not in weights or weights.stored_type(spec.name) != FLOAT8_TYPE:
        return None
    tensors = ModuleTensors.of(spec, weights)
    if block is not None:
        return find_float8(spec, tensors, block, _BLOCK_SCALE)
    has_inverse = tensors.has(_BLOCK_SCALE)  # by its name; it is multiplied all the same
    return find_float8(spec, tensors, "tensor", _BLOCK_SCALE if has_inverse else "weight_scale")


def read_float8(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization_config` whose method is `fp8`. Raises `CheckpointError`."""
    format = raw.text("fmt") or "e4m3"
    if format not in ("e4m3", "float8_e4m3fn"):
        raise raw.wrong("fmt", "e4m3")
    scheme = raw.text("activation_scheme") or "dynamic"
    if scheme not in _ACTIVATIONS:
        raise raw.wrong("activation_scheme", " or ".join(_ACTIVATIONS))
    sizes = raw.items_of("weight_block_size")
    block = check_block(raw.where, "weight_block_size", tuple(sizes)) if sizes else None
    scales = "" if block is None else f", blocks of {block[0]} x {block[1]}"
    return QuantisationScheme(
        name=f"fp8 (e4m3{scales})", activations=_ACTIVATIONS[scheme], find=partial(_find, block)
    )


def check_block(where: str, key: str, sizes: tuple[object, ...] | None) -> tuple[int, int]:
    """Rows and elements of K that have one scale. Raises `CheckpointError`."""
    match sizes:
        case (int(rows), int(columns)) if 0 < rows <= MAX_BLOCK and 0 < columns <= MAX_BLOCK:
            if columns % FLOAT8_BLOCK == 0:
                return rows, columns
        case _:
            pass
    raise CheckpointError(
        f"{where}: {key} is {shorten(sizes)}; float8 weights need one scale for the weight, for "
        f"each row, or for blocks of any number of rows and a multiple of {FLOAT8_BLOCK} elements "
        f"of a row; use another checkpoint of the model"
    )


def find_float8(
    spec: TensorSpec, tensors: ModuleTensors, block: Block, scale_name: str = "weight_scale"
) -> StoredWeight:
    """The weight `spec` and its scales `scale_name`, one for each `block`. Raises CheckpointError
    if tensors are missing or of another shape or type; loading raises it for a scale that is not
    finite."""
    if spec.kind == "embedding":
        raise CheckpointError(
            f"tensor {spec.name} is stored in {FLOAT8_TYPE}, which is not supported for an "
            f"embedding; use a checkpoint that keeps it in bfloat16"
        )
    codes = tensors.take("weight", [spec.shape], (FLOAT8_TYPE,))
    scale = tensors.take(scale_name, _scale_shapes(spec, block), _SCALE_DTYPES)
    unused = [
        tensors.take(name, [(), (1,)], SCALE_DTYPES) for name in _INPUT_SCALES if tensors.has(name)
    ]

    def load() -> Float8Weight:
        return Float8Weight(codes.array().view(np.uint8), _read_scales(spec, scale, block))

    return StoredWeight(
        shape=spec.shape,
        stored_type=FLOAT8_TYPE,
        format=FLOAT8,
        parts=(codes, scale, *unused),
        load=load,
    )


def _scale_shapes(spec: TensorSpec, block: Block) -> list[tuple[int, ...]]:
    rows, reduction = spec.shape
    if block == "tensor":
        return [(), (1,), (1, 1)]
    if block == "channel":
        return [(rows, 1), (rows,)]
    return [(-(-rows // block[0]), -(-reduction // block[1]))]


def _read_scales(
    spec: TensorSpec, entry: StoredTensor, block: Block
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rows, reduction = spec.shape
    stored = entry.array().astype(np.float32)
    if not np.isfinite(stored).all():
        raise CheckpointError(
            f"tensor {entry.name} has a scale that is not finite; fetch the checkpoint again"
        )
    if block == "tensor":
        block = rows, reduction
    elif block == "channel":
        block = 1, reduction
    table = stored.reshape(-(-rows // block[0]), -(-reduction // block[1]))
    return scales_of_blocks(table, (rows, reduction), block)
