"""Mixtures that store all experts of a layer in one tensor: `split_stacks`, and `stacked_parts` for
writing. The result has only the declared names, no byte belongs to two of them, and nothing is read
before it is asked for. Shapes: X experts, E embed, F MLP; N outputs and K inputs of an expert."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare_layer
from cadenza.models.model_config import ModelConfig
from cadenza.weights.safetensors_file import NewTensor, Part
from cadenza.weights.stored_tensor import AnyArray, StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import ExpertMLPSpec, LinearSpec, ParallelMLPSpec
from cadenza.weights.weight_format import FORMAT_OF_NAME
from cadenza.weights.weights import Stored, Weights

# The axes of a stack: [X, N, K]; [X, K, N]; [X, K, N], and biases [X, N], with the outputs of gate
# and up alternating, where others have the one after the other; or [X, ...] of one linear's tensor
Order = Literal["outputs", "inputs", "in_turn", "any"]

# the stack of gates and ups, and that of downs: transformers 5's names, and Granite's
_PAIRS = (
    ("{layer}.mlp.experts.gate_up_proj", "{layer}.mlp.experts.down_proj"),
    ("{block}.experts.gate_up_proj", "{block}.experts.down_proj"),
    ("{block}.input_linear.weight", "{block}.output_linear.weight"),
)

# what the router is called, beside the experts of the former
_ROUTERS = ("gate.weight", "router.weight")

_MLX = ("switch_mlp", "experts")
# MLX stacks gates, ups and downs apart, with what its quantised linears have beside the weight
_MLX_SUFFIXES = ("weight", "scales", "biases", "bias")


Experts = Sequence[Sequence[LinearSpec]]  # of each expert, linears in the order of their outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A tensor that the tensors `suffix` of all experts' linears are stored in."""

    name: str
    experts: Experts
    order: Order = "outputs"
    suffix: str = "weight"

    @property
    def shape(self) -> tuple[int, ...]:
        num_in, num_out = self.experts[0][0].num_in, sum(each.num_out for each in self.experts[0])
        inner = (num_out, num_in) if self.order == "outputs" else (num_in, num_out)
        return len(self.experts), *(inner if self.suffix == "weight" else (num_out,))

    def outputs_of(self, expert: int) -> list[tuple[LinearSpec, slice]]:
        """The linears of an expert, and which outputs are theirs."""
        linears, found, start = self.experts[expert], list[tuple[LinearSpec, slice]](), 0
        for index, each in enumerate(linears):
            alternating = slice(index, None, len(linears))
            consecutive = slice(start, start + each.num_out)
            found.append((each, alternating if self.order == "in_turn" else consecutive))
            start += each.num_out
        return found


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer, and the names of the layer and of their block."""

    mlp: ExpertMLPSpec
    layer: str
    block: str
    is_in_turn: bool

    @property
    def linears(self) -> tuple[Experts, Experts]:
        gate_ups = [expert.gate_up.linears for expert in self.mlp.experts]
        return gate_ups, [(expert.down,) for expert in self.mlp.experts]


def split_stacks(config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with stacked experts under the declared names; others are unchanged. Raises
    CheckpointError if a stacked tensor has the wrong shape, or an expert is stored twice."""
    parts: dict[str, dict[str, Stored]] = {}
    for mixture in _mixtures(config):
        for stacks in _stacks_of(mixture):
            found = [stack for stack in stacks if stack.name in weights]
            if any(_has_inputs_as_rows(stack, weights) for stack in found):
                found = [replace(stack, order="inputs") for stack in found]
            for stack in found:
                parts[stack.name] = _split(stack, weights.entry(stack.name))
            parts |= _renamed_router(mixture, found, weights)
    return weights.with_parts(parts) if parts else weights


def _mixtures(config: ModelConfig) -> Iterator[Mixture]:
    if (experts := config.experts) is None:
        return
    for index in range(config.num_layers):
        mlp, layer = declare_layer(config, index).mlp, f"model.layers.{index}"
        block = f"{layer}.{experts.names.block}"
        if isinstance(mlp, ParallelMLPSpec):
            mlp, block = mlp.experts, layer
        if isinstance(mlp, ExpertMLPSpec):
            yield Mixture(mlp, layer, block, experts.names.are_interleaved)


def _stacks_of(mixture: Mixture) -> Iterator[list[Stack]]:
    """All stacks that the experts of a layer may be in; those of one list have one order."""
    layer, block, (gate_ups, downs) = mixture.layer, mixture.block, mixture.linears
    if mixture.is_in_turn:
        yield _stacks_in_turn(mixture)
    else:
        pairs = (tuple(each.format(layer=layer, block=block) for each in pair) for pair in _PAIRS)
        for gate_up, down in dict.fromkeys(pairs):
            yield [Stack(name=gate_up, experts=gate_ups), Stack(name=down, experts=downs)]
    gates, ups = ([(linears[index],) for linears in gate_ups] for index in (0, 1))
    columns = {"gate_proj": gates, "up_proj": ups, "down_proj": downs}
    yield [
        Stack(name=f"{block}.{stack}.{column}.{suffix}", experts=own, order="any", suffix=suffix)
        for stack in _MLX
        for column, own in columns.items()
        for suffix in _MLX_SUFFIXES
    ]


def _stacks_in_turn(mixture: Mixture) -> list[Stack]:
    """Those of gpt-oss: floats and their biases (`formats.mxfp4` reads the codes)."""
    columns = zip(("gate_up_proj", "down_proj"), mixture.linears, strict=True)
    block = f"{mixture.block}.experts"
    return [
        Stack(name=f"{block}.{name}{ending}", experts=own, order="in_turn", suffix=suffix)
        for name, own in columns
        for ending, suffix in (("", "weight"), ("_bias", "bias"))
    ]


def _has_inputs_as_rows(stack: Stack, weights: Weights) -> bool:
    """Whether a stack can only be [X, K, N]; then its pair is so, which may be square."""
    shape = replace(stack, order="inputs").shape
    is_so = stack.order == "outputs" and weights.shape(stack.name) == shape
    return is_so and shape[1] != shape[2]


def _renamed_router(
    mixture: Mixture, stacks: Sequence[Stack], weights: Weights
) -> dict[str, dict[str, Stored]]:
    """The router beside stacked experts, whatever it is called there."""
    own = mixture.mlp.router.weight
    blocks = {each.name.rpartition(".experts.")[0] for each in stacks if each.order != "any"}
    names = (f"{block}.{router}" for block in blocks for router in _ROUTERS)
    return {
        name: {own: replace(weights.entry(name), name=own)}
        for name in names
        if name in weights and name != own
    }


def part_of_expert(entry: StoredTensor, index: int) -> StoredTensor:
    size = entry.num_bytes // entry.shape[0]
    start = entry.start + index * size
    return replace(entry, shape=entry.shape[1:], start=start, stop=start + size)


def _split(stack: Stack, entry: StoredTensor) -> dict[str, Stored]:
    """The tensors in a stack, each of which is read without a copy if its rows are outputs."""
    _check_shape(stack, entry)
    found: dict[str, Stored] = {}
    for expert in range(len(stack.experts)):
        part, linears = part_of_expert(entry, expert), stack.outputs_of(expert)
        for linear, outputs in linears:
            name = f"{linear.name}.{stack.suffix}"
            if stack.order == "any":
                found[name] = replace(part, name=name)
            elif stack.order == "outputs":
                found[name] = _rows(part, name, outputs)
            else:
                found[name] = _columns(part, outputs, (linear.num_out, linear.num_in), len(linears))
    return found


def _rows(part: StoredTensor, name: str, rows: slice) -> StoredTensor:
    row_bytes = part.num_bytes // part.shape[0]
    start, stop = (part.start + row * row_bytes for row in (rows.start, rows.stop))
    shape = rows.stop - rows.start, *part.shape[1:]
    return replace(part, name=name, shape=shape, start=start, stop=stop)


def _columns(
    part: StoredTensor, outputs: slice, shape: tuple[int, int], num_sharing: int
) -> StoredWeight:
    """A weight [N, K], or the biases [N], of an expert's part [K, N'] or [N']."""

    def load() -> AnyArray:
        return np.ascontiguousarray(part.array().T[outputs])

    return StoredWeight(
        shape=shape[: len(part.shape)],
        stored_type=part.dtype,
        format=None,
        parts=(part,),
        load=load,
        num_sharing=num_sharing,
    )


def _check_shape(stack: Stack, entry: StoredTensor) -> None:
    count, is_any = len(stack.experts), stack.order == "any"
    if (entry.shape[:1] == (count,)) if is_any else (entry.shape == stack.shape):
        return
    raise CheckpointError(
        f"tensor {entry.name} has shape {list(entry.shape)}; config.json requires "
        f"{f'{count} experts' if is_any else list(stack.shape)}; correct config.json or fetch the "
        f"checkpoint again"
    )


def stacked_parts(config: ModelConfig, parts: Sequence[Part]) -> list[Part]:
    """What is written for a model whose stacks alternate: stacks in place of the tensors of
    experts. Each part has one tensor. Others' parts are unchanged."""
    by_name = {part.tensors[0].name: part for part in parts}
    for mixture in _mixtures(config):
        for stack in _stacks_in_turn(mixture) if mixture.is_in_turn else ():
            by_name[stack.name] = _joined(stack, by_name)
    return [*by_name.values()]


def _joined(stack: Stack, parts: dict[str, Part]) -> Part:
    """The stack of all experts' tensors, which it takes out of `parts`."""
    taken = [
        [
            (parts.pop(f"{linear.name}.{stack.suffix}"), outputs)
            for linear, outputs in stack.outputs_of(expert)
        ]
        for expert in range(len(stack.experts))
    ]
    dtype, (_, *inner) = taken[0][0][0].tensors[0].dtype, stack.shape

    def make() -> Iterator[AnyArray]:
        for own in taken:
            stacked = np.empty(inner[::-1], FORMAT_OF_NAME[dtype].numpy)
            for part, outputs in own:
                whole = np.concatenate([each.reshape(-1) for each in part.make()])
                stacked[outputs] = whole.reshape(part.tensors[0].shape)
            yield np.ascontiguousarray(stacked.T)

    return Part(tensors=(NewTensor(name=stack.name, dtype=dtype, shape=stack.shape),), make=make)
