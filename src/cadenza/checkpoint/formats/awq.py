"""Reads AWQ checkpoints in AutoAWQ's gemm layout.

Owns the settings and the order of the codes in a word. A module is quantised if it has `qweight`.

Shapes: N out, K in, S stored groups of K.
"""

from dataclasses import dataclass

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.formats.grouped import Bytes, CodeLayout, unpack_codes
from cadenza.checkpoint.formats.scheme import ColumnTensors, ModuleTensors, read_group_size
from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.quantised_weight import QuantisedWeight
from cadenza.checkpoint.stored_weight import StoredWeight
from cadenza.checkpoint.tensor_file import AnyArray
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

BITS = 4
_PER_WORD = 32 // BITS

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in its word of each of eight columns: a word has the even columns first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQ:
    """A `QuantisationScheme`."""

    group: int | None

    @property
    def name(self) -> str:
        return f"awq int{BITS} with groups of {self.group or 'all inputs'}"

    @property
    def activations(self) -> str | None:
        return None

    def find(self, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        tensors = ModuleTensors.of(spec, weights)
        if not tensors.has("qweight"):
            return None
        columns, reduction = spec.shape
        if columns % _PER_WORD:
            raise CheckpointError(
                f"{tensors.module} has {columns} outputs; AWQ needs a multiple of {_PER_WORD}"
            )
        words, groups = columns // _PER_WORD, -(-reduction // (self.group or reduction))
        stored = ColumnTensors.take(tensors, (reduction, words), (groups, words), columns)
        layout = CodeLayout(
            bits=BITS, group=self.group, scale_dtype=stored.scales.dtype, correction="zero_point"
        )

        def load() -> QuantisedWeight:
            return layout.weight(
                _columns(tensors.read(stored.codes)).T,
                tensors.read(stored.scales).T,
                _columns(tensors.read(stored.zeros)).T,
            )

        return StoredWeight(
            shape=spec.shape,
            stored_type="awq int4",
            format=layout.format,
            parts=(stored.codes, stored.zeros, stored.scales),
            load=load,
        )


def read_awq(raw: JsonObject) -> AWQ:
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
    return AWQ(group=read_group_size(raw, key))


def _columns(words: AnyArray) -> Bytes:
    """Codes [., N] of words [., N / 8]."""
    stored = unpack_codes(words, BITS, words.shape[1] * _PER_WORD)
    return stored.reshape(len(words), -1, _PER_WORD)[..., _PLACES].reshape(len(words), -1)
