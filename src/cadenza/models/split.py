"""Models divided among devices: `split_model` and `split_weights`. Each device has whole heads and
a part of each MLP: some outputs of the linears that read the stream, and some inputs of those that
write to it; all else is whole. All parts have one shape, and together they are the model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cadenza.errors import ConfigError
from cadenza.models.declaration import declare_head, declare_layer
from cadenza.models.model_config import ModelConfig
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import AttentionSpec, GatedMLPSpec, LinearSpec
from cadenza.weights.weights import Weights

FLAG = "--tensor-parallel-size"

# Of the inputs of a linear that writes to the stream: each is summed by itself, on whatever device
# has it, and the sums are added in one tree
NUM_SPANS = 8

DEVICE_COUNTS = (1, 2, 4, 8)  # numbers of devices that have equally many spans

_Side = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class Rank:
    """The index of a device among `count`."""

    index: int
    count: int

    def part(self, size: int) -> slice:
        each = size // self.count
        return slice(self.index * each, (self.index + 1) * each)


def split_model(model: ModelConfig, count: int) -> ModelConfig:
    """Each device's part of a model. Raises ConfigError if it cannot be divided."""
    refusal = _refusal(model, count)
    if refusal is not None:
        raise ConfigError(f"{FLAG} {count}: {refusal}")
    return replace(
        model,
        num_heads=model.num_heads // count,
        num_kv_heads=model.num_kv_heads // count,
        intermediate_size=model.intermediate_size // count,
        attention_scale=model.scale_of(model.heads),
    )


def split_weights(weights: Weights, model: ModelConfig, rank: Rank) -> Weights:
    """The tensors of one device, by their names in the whole model. Raises ConfigError if they are
    stored quantised."""
    parts: dict[str, StoredWeight] = {}
    for name, side in _divided(model):
        entry = weights.tensors.get(name)
        if entry is None:
            continue  # a head that is tied
        if not isinstance(entry, StoredTensor) or entry.format is not None:
            raise ConfigError(
                f"{FLAG}: the weights are stored as {entry.stored_type}, whose scales cannot be "
                f"divided yet; use a checkpoint in floats"
            )
        parts[name] = _part_of(entry, side, rank)
    return weights.with_stored(parts)


def obstacle_to_split(model: ModelConfig) -> str | None:
    """Why devices cannot share a model of this type; None if they can."""
    layers = [declare_layer(model, index) for index in range(model.num_layers)]
    is_plain = all(
        isinstance(each.mixer, AttentionSpec) and isinstance(each.mlp, GatedMLPSpec)
        for each in layers
    )
    has_own_heads = any(kind.heads is not None for kind in model.layer_kinds)
    others = (
        model.has_fused_tensors
        or model.qk_norm == "all_heads"
        or model.layer_inputs is not None
        or model.has_attention_gate
        or model.has_attention_sinks
        or model.reads_hidden
    )
    if has_own_heads or others or not is_plain:
        return (
            f"devices cannot share models of the family {model.family} yet; they can where all "
            f"layers have attention of one shape and a plain MLP"
        )
    if model.vision is not None:
        return "devices cannot share a model that sees yet; set --no-images"
    for what, size in (("queries", model.heads.query_size), ("MLP", model.intermediate_size)):
        if size % NUM_SPANS:
            return f"its {what} have {size} values, which are no multiple of {NUM_SPANS}"
    return None


def _refusal(model: ModelConfig, count: int) -> str | None:
    if count not in DEVICE_COUNTS:
        return f"supported are {', '.join(map(str, DEVICE_COUNTS))}"
    for what, size in (("heads", model.num_heads), ("KV heads", model.num_kv_heads)):
        if size % count:
            both = gcd(model.num_heads, model.num_kv_heads)
            fitting = [each for each in DEVICE_COUNTS if both % each == 0]
            return (
                f"the model has {size} {what}, which {count} devices cannot share evenly; set "
                f"{FLAG} {max(fitting)}"
            )
    return obstacle_to_split(model)


def _divided(model: ModelConfig) -> Iterator[tuple[str, _Side]]:
    """The tensors that devices share, and which side of them is divided."""
    for index in range(model.num_layers):
        layer = declare_layer(model, index)
        assert isinstance(layer.mixer, AttentionSpec), "the model can be divided"
        assert isinstance(layer.mlp, GatedMLPSpec), "the model can be divided"
        for linear in (*layer.mixer.qkv.linears, *layer.mlp.gate_up.linears):
            yield from _outputs_of(linear)
        for linear in (layer.mixer.out, layer.mlp.down):
            yield linear.weight, "inputs"
    if model.vocab_size % NUM_SPANS == 0:
        yield declare_head(model).name, "outputs"


def _outputs_of(linear: LinearSpec) -> Iterator[tuple[str, _Side]]:
    yield linear.weight, "outputs"
    if linear.bias is not None:
        yield linear.bias, "outputs"


def _part_of(entry: StoredTensor, side: _Side, rank: Rank) -> StoredWeight:
    axis = 0 if side == "outputs" else len(entry.shape) - 1
    part = rank.part(entry.shape[axis])
    cut = (slice(None),) * axis + (part,)
    shape = (*entry.shape[:axis], part.stop - part.start, *entry.shape[axis + 1 :])
    return StoredWeight(
        shape=shape,
        stored_type=entry.stored_type,
        format=None,
        parts=(entry,),
        load=partial(_load, entry, cut),
        num_sharing=rank.count,
    )


def _load(entry: StoredTensor, cut: tuple[slice, ...]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(entry.array()[cut])
