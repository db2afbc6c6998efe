"""The format in which each tensor of a model is held: `format_of`, `held_formats`. Memory plans,
bounds and loading derive the format of a tensor from `format_of`, so that they agree."""

from collections.abc import Callable, Iterable

from cadenza.config import Quantization
from cadenza.models.declaration import declare, declare_operands
from cadenza.models.model_config import ModelConfig
from cadenza.weights.tensor_spec import TensorKind, TensorSpec
from cadenza.weights.weight_format import (
    FLOAT_FORMATS,
    INT4,
    INT8,
    WeightDType,
    WeightFormat,
    joined,
    panel_formats,
)
from cadenza.weights.weights import Weights

# of the tensor of a name that a checkpoint stores as codes; None for floats
StoredFormat = Callable[[str], WeightFormat | None]

# routers choose experts, where a small error is a large one; norms and biases are small
_QUANTISED_KINDS: frozenset[TensorKind] = frozenset({"embedding", "head", "linear"})


def format_of(
    spec: TensorSpec,
    dtype: WeightDType,
    quantization: Quantization = "none",
    stored: WeightFormat | None = None,
) -> WeightFormat:
    """The format in which a model that computes in `dtype` holds a tensor; `stored` is that of a
    weight which the checkpoint stores quantised."""
    if stored is not None:
        return stored
    if quantization == "none" or spec.kind not in _QUANTISED_KINDS:
        return FLOAT_FORMATS[dtype]
    return INT4 if quantization == "int4" and not needs_8_bits(spec) else INT8


def needs_8_bits(spec: TensorSpec) -> bool:
    """Whether 4 bits would cost too much accuracy: in embedding, head and the first layer, whose
    error every other layer amplifies."""
    return spec.kind != "linear" or spec.is_in_first_layer


def held_formats(config: ModelConfig, weights: Weights) -> StoredFormat:
    """The formats of the weights that a checkpoint stores quantised, as they are held. An
    operand with integer codes beside floats, or beside float8, is held in floats, as one that is
    transposed; codes whose formats cannot lie beside each other are held in one that has them
    all."""
    formats = {spec.name: weights.format(spec.name) for spec in declare(config)}
    for operand in declare_operands(config):
        names = [linear.weight for linear in operand.linears]
        own = [formats[name] for name in names]
        if operand.is_transposed or len({_kind(format) for format in own}) > 1:
            formats.update(dict.fromkeys(names))
        codes = [format for format in own if format is not None and format.is_quantised]
        if len(codes) == len(own) and not operand.is_transposed:
            rows = [linear.num_out for linear in operand.linears]
            one = [joined(codes)] * len(codes)
            held = panel_formats(codes, rows) if operand.are_side_by_side else one
            formats.update(zip(names, held, strict=True))
    return formats.get


def _kind(format: WeightFormat | None) -> str:
    """The class of formats that one operand can have."""
    return "floats" if format is None else "codes" if format.is_quantised else format.name


def stored_bytes(
    specs: Iterable[TensorSpec],
    dtype: WeightDType,
    quantization: Quantization = "none",
    stored_format: StoredFormat = lambda _: None,
) -> int:
    """Bytes of tensors in their formats; `stored_format` gives that of a tensor's name."""
    return sum(
        format_of(spec, dtype, quantization, stored_format(spec.name)).num_bytes(spec.shape)
        for spec in specs
    )
