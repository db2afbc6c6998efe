"""mxfp4 (OCP Microscaling Formats 1.0): nibbles of e2m1 in groups of 32 with scales of e8m0.

Twice an e2m1 value is an integer, so the weight has codes of 8 bits, exactly.
"""

import numpy as np

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.formats.grouped import Bytes, unpack_codes
from cadenza.checkpoint.formats.scheme import ModuleTensors
from cadenza.checkpoint.quantised_weight import QuantisedWeight
from cadenza.checkpoint.stored_tensor import StoredTensor, StoredWeight
from cadenza.checkpoint.weight_format import GROUP, code_format

MXFP4_GROUP = GROUP
_FORMAT = code_format(8, "float32")

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_NOT_A_NUMBER = 255


def stored_mxfp4(
    spec: TensorSpec, tensors: ModuleTensors, method: str, codes: StoredTensor, suffix: str
) -> StoredWeight:
    """The weight `spec` with `codes` that have the even elements in the low nibbles; `suffix` names
    the tensor of its scales. Raises `CheckpointError`.
    """
    rows, reduction = spec.shape
    scales = tensors.take(suffix, [(rows, reduction // MXFP4_GROUP)], ("uint8",))
    return StoredWeight(
        shape=spec.shape,
        stored_type=f"{method} mxfp4",
        format=_FORMAT,
        parts=(codes, scales),
        load=lambda: mxfp4_weight(unpack_codes(codes.array(), 4, reduction), scales.array()),
    )


def mxfp4_weight(nibbles: Bytes, exponents: Bytes) -> QuantisedWeight:
    """The weight of nibbles [N, K] and the exponents [N, K / 32] of its scales."""
    halved = np.ldexp(np.float32(1.0), exponents.astype(np.int32) - 128).astype(np.float32)
    scales = np.where(exponents == _NOT_A_NUMBER, np.float32(np.nan), halved)
    return QuantisedWeight(_DOUBLED[nibbles], scales.astype(np.float32))
