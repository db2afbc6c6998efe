"""gpt-oss's experts in MXFP4 (method `mxfp4`): `gate_up_proj_blocks` [X, 2 F, K / 32, 16] and
`down_proj_blocks` [X, E, K / 32, 16], even elements in the low nibbles, and `_scales` [X, N, K /
32]. Output 2 f is the gate's f, 2 f + 1 up's. What has no such tensors is stored as floats,
whatever `modules_to_not_convert` names. Shapes: X experts, E embed, F MLP, N out, K in."""

import re

from cadenza.checkpoint.formats.grouped import MXFP4_GROUP, mxfp4_weight, unpack_codes
from cadenza.checkpoint.formats.scheme import ModuleTensors, QuantisationScheme
from cadenza.checkpoint.stacked_experts import part_of_expert
from cadenza.errors import CheckpointError
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import MXFP4
from cadenza.weights.weights import Weights

_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_BLOCK_BYTES = MXFP4_GROUP // 2


def _find(spec: TensorSpec, weights: Weights) -> StoredWeight | None:
    found = _EXPERT.fullmatch(spec.name)
    if found is None:
        return None
    is_down = found["part"] == "down"
    name = "down_proj" if is_down else "gate_up_proj"
    tensors = ModuleTensors(weights, found["stack"])
    if not tensors.has(f"{name}_blocks"):
        return None
    rows, reduction = spec.shape
    if reduction % MXFP4_GROUP:
        raise CheckpointError(
            f"{spec.name} has {reduction} inputs, which is not a multiple of {MXFP4_GROUP}; "
            f"correct config.json"
        )
    sharing = 1 if is_down else 2
    groups = sharing * rows, reduction // MXFP4_GROUP
    blocks, scales = (
        _part(tensors, f"{name}_{suffix}", int(found["index"]), shape)
        for suffix, shape in (("blocks", (*groups, _BLOCK_BYTES)), ("scales", groups))
    )
    every = slice(int(found["part"] == "up"), None, sharing)

    def load() -> QuantisedWeight:
        own = blocks.array()[every].reshape(rows, -1)
        return mxfp4_weight(unpack_codes(own, 4, reduction), scales.array()[every])

    return StoredWeight(
        shape=spec.shape,
        stored_type="mxfp4",
        format=MXFP4,
        parts=(blocks, scales),
        load=load,
        num_sharing=sharing,
    )


def _part(tensors: ModuleTensors, suffix: str, index: int, shape: tuple[int, ...]) -> StoredTensor:
    """The part of expert `index` of a stacked tensor, which has at least so many."""
    name = f"{tensors.module}.{suffix}"
    stored = tensors.weights.shape(name)[:1] if tensors.has(suffix) else ()
    count = max((index + 1, *stored))
    return part_of_expert(tensors.take(suffix, [(count, *shape)], ("uint8",)), index)


# of a `quantization_config` whose method is `mxfp4`: the tensors say everything
MXFP4_METHOD = QuantisationScheme(name=f"mxfp4 with groups of {MXFP4_GROUP}", find=_find)
