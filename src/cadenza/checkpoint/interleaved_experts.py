"""Reads mixtures whose stacked tensors have inputs as their rows: `split_interleaved_experts`, with
the outputs of gate and up in turn, as gpt-oss stores them, and `split_transposed_experts`, with the
one behind the other, as Qwen3-VL does; and stacks the former for writing: `stacked_parts`.

Owns the floats `gate_up_proj` [X, E, 2 F] and `down_proj` [X, F, E], whose inputs are the rows, and
the biases `gate_up_proj_bias` [X, 2 F] and `down_proj_bias` [X, E]. Output 2 f is that of the
gate's f, output 2 f + 1 that of up's. `formats.mxfp4` reads the codes. Invariant: nothing is read
before it is asked for.

Shapes: X experts, E embed, F MLP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from cadenza.checkpoint.declaration import declare_layer
from cadenza.checkpoint.dtypes import FORMAT_OF_NAME
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.safetensors_writer import NewTensor, Part
from cadenza.checkpoint.stored_tensor import AnyArray, StoredTensor, StoredWeight
from cadenza.checkpoint.tensor_spec import ExpertMLPSpec, LinearSpec
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

Places = list[tuple[LinearSpec, slice]]
"""The linears in an expert's part of a stacked tensor, and the outputs of each."""


def split_interleaved_experts(config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with stacked experts under the declared names; others are unchanged.

    Raises:
        CheckpointError: a stacked tensor has the wrong shape, or an expert is stored twice.
    """
    if config.experts is None or not config.experts.names.are_interleaved:
        return weights
    found: dict[str, StoredWeight] = {}
    for index in range(config.num_layers):
        mlp = declare_layer(config, index).mlp
        if isinstance(mlp, ExpertMLPSpec):
            prefix = f"model.layers.{index}.{config.experts.names.block}.experts"
            found |= _of_layer(prefix, mlp, weights)
    twice = next((name for name in found if name in weights), None)
    if twice is not None:
        raise CheckpointError(
            f"the weights contain {twice} twice: as a separate tensor and in "
            f"{found[twice].parts[0].name}; remove one of the two"
        )
    return weights.with_stored(found) if found else weights


def split_transposed_experts(config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with the stacks [X, E, 2 F] and [X, F, E] under the declared names. Those with
    outputs as their rows are unchanged (`stacked_experts`)."""
    if config.experts is None or config.experts.names.are_interleaved:
        return weights
    found: dict[str, StoredWeight] = {}
    for index in range(config.num_layers):
        mlp = declare_layer(config, index).mlp
        if isinstance(mlp, ExpertMLPSpec):
            found |= _transposed_of_layer(f"model.layers.{index}.mlp.experts", mlp, weights)
    return weights.with_stored(found) if found else weights


def _transposed_of_layer(
    prefix: str, mlp: ExpertMLPSpec, weights: Weights
) -> dict[str, StoredWeight]:
    """Empty unless a stack has its inputs as rows; one of the two has not as many of both."""
    stacks = {f"{prefix}.{name}": experts for name, experts in _consecutive(mlp).items()}
    shapes = {
        name: (len(experts), experts[0][0][0].num_in, sum(each.num_out for each, _ in experts[0]))
        for name, experts in stacks.items()
        if name in weights
    }
    if not any(
        weights.entry(name).shape == shape and shape[1] != shape[2]
        for name, shape in shapes.items()
    ):
        return {}
    found: dict[str, StoredWeight] = {}
    for name, shape in shapes.items():
        entry = weights.entry(name)
        _check_shape(entry, shape)
        for place, places in enumerate(stacks[name]):
            found |= _split(part_of_expert(entry, place), places)
    return found


def _consecutive(mlp: ExpertMLPSpec) -> dict[str, list[Places]]:
    """The stacks of weights, with the outputs of each expert's linears one behind the other."""
    gate_ups: list[Places] = []
    for gate, up in (expert.gate_up.linears for expert in mlp.experts):
        places = slice(0, gate.num_out), slice(gate.num_out, gate.num_out + up.num_out)
        gate_ups.append([(gate, places[0]), (up, places[1])])
    downs: list[Places] = [[(expert.down, slice(None))] for expert in mlp.experts]
    return {"gate_up_proj": gate_ups, "down_proj": downs}


def halves(first: LinearSpec, second: LinearSpec) -> Places:
    """Gate and up, whose outputs are in turn."""
    return [(first, slice(0, None, 2)), (second, slice(1, None, 2))]


def part_of_expert(entry: StoredTensor, index: int) -> StoredTensor:
    """The part of expert `index` of a stacked tensor [X, ...]."""
    size = entry.num_bytes // entry.shape[0]
    start = entry.start + index * size
    return replace(entry, shape=entry.shape[1:], start=start, stop=start + size)


def stacked_parts(config: ModelConfig, parts: Sequence[Part]) -> list[Part]:
    """What is written for a model whose stacks are interleaved: stacks in place of the tensors of
    experts. Each part has one tensor. Others' parts are unchanged.
    """
    if config.experts is None or not config.experts.names.are_interleaved:
        return [*parts]
    by_name = {part.tensors[0].name: part for part in parts}
    for index in range(config.num_layers):
        mlp = declare_layer(config, index).mlp
        if isinstance(mlp, ExpertMLPSpec):
            prefix = f"model.layers.{index}.{config.experts.names.block}.experts"
            for name, experts in _stacks(mlp).items():
                for suffix in ("", "_bias"):
                    full = f"{prefix}.{name}{suffix}"
                    by_name[full] = _stack(full, experts, by_name, is_bias=bool(suffix))
    return [*by_name.values()]


def _stack(name: str, experts: Sequence[Places], parts: dict[str, Part], *, is_bias: bool) -> Part:
    """The stack of all experts' tensors, which it takes out of `parts`."""
    taken: list[list[tuple[Part, slice]]] = [
        [(parts.pop(_tensor(linear, is_bias=is_bias)), outputs) for linear, outputs in places]
        for places in experts
    ]
    dtype = taken[0][0][0].tensors[0].dtype
    first = experts[0][0][0]
    num_out = sum(linear.num_out for linear, _ in experts[0])
    inner = (num_out,) if is_bias else (first.num_in, num_out)

    def make() -> Iterator[AnyArray]:
        for own in taken:
            stacked = np.empty((num_out, *inner[:-1]), FORMAT_OF_NAME[dtype].numpy)
            for part, outputs in own:
                whole = np.concatenate([each.reshape(-1) for each in part.make()])
                stacked[outputs] = whole.reshape(part.tensors[0].shape)
            yield np.ascontiguousarray(stacked.T)

    tensor = NewTensor(name=name, dtype=dtype, shape=(len(experts), *inner))
    return Part(tensors=(tensor,), make=make)


def _tensor(linear: LinearSpec, *, is_bias: bool) -> str:
    if not is_bias:
        return linear.weight
    assert linear.bias is not None, "interleaved experts have biases"
    return linear.bias


def _stacks(mlp: ExpertMLPSpec) -> dict[str, list[Places]]:
    """The stacks of weights, whose biases are beside them: for each, the places of each expert."""
    return {
        "gate_up_proj": [halves(*expert.gate_up.linears) for expert in mlp.experts],
        "down_proj": [[(expert.down, slice(None))] for expert in mlp.experts],
    }


def _of_layer(prefix: str, mlp: ExpertMLPSpec, weights: Weights) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    for name, experts in _stacks(mlp).items():
        num_in, num_out = experts[0][0][0].num_in, sum(each.num_out for each, _ in experts[0])
        for suffix, shape in (("", (num_in, num_out)), ("_bias", (num_out,))):
            full = f"{prefix}.{name}{suffix}"
            if full in weights:
                entry = weights.entry(full)
                _check_shape(entry, (len(experts), *shape))
                for index, places in enumerate(experts):
                    found |= _split(part_of_expert(entry, index), places)
    return found


def _split(part: StoredTensor, places: Places) -> Iterator[tuple[str, StoredWeight]]:
    """The weights [N, K], or the biases [N], of an expert's part [K, N'] or [N']."""
    for linear, outputs in places:

        def load(outputs: slice = outputs) -> AnyArray:
            return np.ascontiguousarray(part.array().T[outputs])

        is_bias = len(part.shape) == 1
        yield (
            _tensor(linear, is_bias=is_bias),
            StoredWeight(
                shape=(linear.num_out,) if is_bias else (linear.num_out, linear.num_in),
                stored_type=part.dtype,
                format=None,
                parts=(part,),
                load=load,
                num_sharing=len(places),
            ),
        )


def _check_shape(entry: StoredTensor, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json requires "
            f"{list(shape)}; correct config.json or fetch the checkpoint again"
        )
