"""Reads AWQ checkpoints in AutoAWQ's gemm layout. A module is quantised if it has `qweight`.
Shapes: N out, K in, S stored groups of K."""

from functools import partial

from cadenza.checkpoint.formats.grouped import Bytes, CodeLayout, unpack_codes
from cadenza.checkpoint.formats.scheme import ModuleTensors, QuantisationScheme, read_group_size
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.stored_tensor import AnyArray, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

BITS = 4
_PER_WORD = 32 // BITS

# the position in its word of each of eight columns: a word has the even columns first
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


def _find(group: int | None, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
    tensors = ModuleTensors.of(spec, weights)
    if not tensors.has("qweight"):
        return None
    columns, reduction = spec.shape
    if columns % _PER_WORD:
        raise CheckpointError(
            f"{tensors.module} has {columns} outputs; AWQ needs a multiple of {_PER_WORD}"
        )
    words, groups = columns // _PER_WORD, -(-reduction // (group or reduction))
    shapes = (reduction, words), (groups, words)
    codes, zeros, scales = tensors.take_columns(*shapes, columns)
    layout = CodeLayout(bits=BITS, group=group, scale_dtype=scales.dtype, correction="zero_point")
    return StoredWeight(
        shape=spec.shape,
        stored_type="awq int4",
        format=layout.format,
        parts=(codes, zeros, scales),
        load=lambda: layout.weight(
            _columns(codes.array()).T, scales.array().T, _columns(zeros.array()).T
        ),
    )


def read_awq(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization_config`. Raises `CheckpointError`."""
    bits = raw.get("bits") if raw.has("bits") else raw.get("w_bit")
    if bits != BITS:
        raise CheckpointError(f"{raw.where}: bits is {shorten(bits)}; supported for AWQ is {BITS}")
    version = (raw.text("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"{raw.where}: version {shorten(version)} of AWQ is not supported; use a checkpoint in "
            f"version gemm"
        )
    if not raw.flag("zero_point", True):
        raise raw.wrong("zero_point", "true")
    key = "group_size" if raw.has("group_size") else "q_group_size"
    group = read_group_size(raw, key)
    name = f"awq int{BITS} with groups of {group or 'all inputs'}"
    return QuantisationScheme(name=name, find=partial(_find, group))


def _columns(words: AnyArray) -> Bytes:
    """Codes [., N] of words [., N / 8]."""
    stored = unpack_codes(words, BITS, words.shape[1] * _PER_WORD)
    return stored.reshape(len(words), -1, _PER_WORD)[..., _POSITIONS].reshape(len(words), -1)
