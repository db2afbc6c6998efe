"""The class of the native kernels' arithmetic: what decides the bits of a step, by name. All tables
without bf16 instructions compute the same bits, the class `PORTABLE`; with them, tiles among them,
the products of bfloat16 round in another way, and the class is that of the instructions."""

from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint.tensor_formats import format_of
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.dtypes import WeightDType
from cadenza.weights.tensor_spec import TensorKind
from cadenza.weights.weights import Weights

PORTABLE = "portable"

# Of a table of tests, which computes the bits of instructions that the CPU lacks.
_EMULATED = "_emulated"

# Weights whose products take time; routers are small.
_LARGE: frozenset[TensorKind] = frozenset({"embedding", "head", "linear", "tower"})


def takes_portable_kernels(model: ModelConfig, weights: Weights, setup: RunnerSetup) -> bool:
    """Whether a step takes the kernels without bf16 instructions: on request, or where they cost
    nothing, since integer codes in all large weights and in KV leave only norms and routers."""
    if setup.arithmetic == "portable":
        return True
    dtype: WeightDType = "float32" if setup.dtype == "float32" else "bfloat16"
    return setup.kv_cache_dtype == "int8" and all(
        format_of(spec, dtype, setup.quantization, weights.format(spec.name)).is_quantised
        for spec in declare(model)
        if spec.kind in _LARGE
    )


def name_class(isa: str, portable_isa: str, *, is_portable: bool, dtype: str) -> str:
    """The class of a step of the table `isa`; products of float32 are the same in all."""
    own = isa.removesuffix(_EMULATED)
    has_same_bits = is_portable or isa == portable_isa or dtype == "float32"
    return PORTABLE if has_same_bits else own
