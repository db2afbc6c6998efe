"""Reads mixtures that store all experts of a layer in stacked tensors: `split_stacked_experts`.

Newer versions of transformers write `mlp.experts.gate_up_proj` [X, 2 F, E] and
`mlp.experts.down_proj` [X, E, F], with the router as `mlp.gate`; beside an MLP they are `experts`
of the layer. Granite's files have the same as `input_linear.weight` and `output_linear.weight` of
their block. MLX writes `switch_mlp`, or `experts`, with gate, up and down [X, ...] of each tensor
that its linears have. Each expert is a contiguous range of bytes, so it is read without a copy.
Invariant: the result has only the declared names, and no byte belongs to two of them.

Shapes: X experts, E embed, F MLP.
"""

from collections.abc import Iterator
from dataclasses import replace

from cadenza.checkpoint.declaration import declare_layer
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.stored_tensor import StoredTensor
from cadenza.checkpoint.tensor_spec import ExpertMLPSpec, LinearSpec, ParallelMLPSpec
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError


def split_stacked_experts(config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with stacked experts renamed to the declared tensors; others are unchanged.

    Raises:
        CheckpointError: a stacked tensor has the wrong shape, or an expert is stored twice.
    """
    parts: dict[str, list[StoredTensor]] = {}
    for index in range(config.num_layers):
        mlp = declare_layer(config, index).mlp
        if isinstance(mlp, ParallelMLPSpec):
            parts |= _parts_of_layer(f"model.layers.{index}", mlp.experts, weights)
        if not isinstance(mlp, ExpertMLPSpec):
            continue
        assert config.experts is not None, "the layer has experts"
        layer, names = f"model.layers.{index}", config.experts.names
        block = f"{layer}.{names.block}"
        if not names.are_interleaved:
            for prefix in dict.fromkeys((f"{layer}.mlp", block)):
                parts |= _parts_of_layer(prefix, mlp, weights)
            parts |= _parts_of_block(block, mlp, weights)
        for stack in ("switch_mlp", "experts"):
            parts |= _parts_of_mlx(f"{block}.{stack}", mlp, weights)
    for name, entries in parts.items():
        twice = next((entry.name for entry in entries if entry.name in weights), None)
        if twice is not None:
            raise CheckpointError(
                f"the weights contain {twice} twice: as a separate tensor and in {name}; "
                f"remove one of the two"
            )
    return weights.with_parts(parts) if parts else weights


def _parts_of_layer(
    prefix: str, mlp: ExpertMLPSpec, weights: Weights
) -> dict[str, list[StoredTensor]]:
    """The parts of each stacked tensor of a layer, by its name; empty if none is stacked."""
    names = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    parts = _parts_of_stacks(names, mlp, weights)
    for router in (f"{prefix}.gate.weight", f"{prefix}.router.weight"):
        if parts and router in weights and router != mlp.router.weight:
            parts[router] = [replace(weights.entry(router), name=mlp.router.weight)]
    return parts


def _parts_of_block(
    block: str, mlp: ExpertMLPSpec, weights: Weights
) -> dict[str, list[StoredTensor]]:
    names = f"{block}.input_linear.weight", f"{block}.output_linear.weight"
    return _parts_of_stacks(names, mlp, weights)


def _parts_of_stacks(
    names: tuple[str, str], mlp: ExpertMLPSpec, weights: Weights
) -> dict[str, list[StoredTensor]]:
    """Of the stack of gates and ups, and of that of downs."""
    gate_ups = [each for expert in mlp.experts for each in expert.gate_up.linears]
    downs = [expert.down for expert in mlp.experts]
    parts: dict[str, list[StoredTensor]] = {}
    stored = dict(zip(names, (gate_ups, downs), strict=True))
    for name, linears in stored.items():
        if name in weights:
            num_out = sum(linear.num_out for linear in linears) // len(mlp.experts)
            shape = (len(mlp.experts), num_out, linears[0].num_in)
            parts[name] = list(_cut(weights.entry(name), linears, shape))
    return parts


def _parts_of_mlx(
    prefix: str, mlp: ExpertMLPSpec, weights: Weights
) -> dict[str, list[StoredTensor]]:
    """The same for MLX, whose quantised linears have scales and biases beside the weight."""
    columns = {
        "gate_proj": [expert.gate_up.linears[0] for expert in mlp.experts],
        "up_proj": [expert.gate_up.linears[1] for expert in mlp.experts],
        "down_proj": [expert.down for expert in mlp.experts],
    }
    parts: dict[str, list[StoredTensor]] = {}
    for column, linears in columns.items():
        for suffix in ("weight", "scales", "biases", "bias"):
            name = f"{prefix}.{column}.{suffix}"
            if name in weights:
                parts[name] = list(_cut_evenly(weights.entry(name), linears, suffix))
    return parts


def _cut_evenly(
    entry: StoredTensor, linears: list[LinearSpec], suffix: str
) -> Iterator[StoredTensor]:
    """Cuts a tensor [X, ...] into one for each expert."""
    if entry.shape[:1] != (len(linears),):
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json requires "
            f"{len(linears)} experts; correct config.json or fetch the checkpoint again"
        )
    size = entry.num_bytes // len(linears)
    for index, linear in enumerate(linears):
        start = entry.start + index * size
        name, shape = f"{linear.name}.{suffix}", entry.shape[1:]
        yield replace(entry, name=name, shape=shape, start=start, stop=start + size)


def _cut(
    entry: StoredTensor, linears: list[LinearSpec], shape: tuple[int, ...]
) -> Iterator[StoredTensor]:
    """Cuts a stacked tensor into consecutive parts."""
    if entry.shape != shape:
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json requires "
            f"{list(shape)}; correct config.json or fetch the checkpoint again"
        )
    row_bytes = entry.num_bytes // (shape[0] * shape[1])
    start = entry.start
    for linear in linears:
        stop = start + linear.num_out * row_bytes
        part = (linear.num_out, linear.num_in)
        yield replace(entry, name=linear.weight, shape=part, start=start, stop=stop)
        start = stop
