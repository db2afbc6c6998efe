"""Reads mixtures that store all experts of a layer in two stacked tensors: `split_stacked_experts`.

Newer versions of transformers write `mlp.experts.gate_up_proj` [X, 2 F, E] and
`mlp.experts.down_proj` [X, E, F], with the router as `mlp.gate`. Each expert is a contiguous range
of bytes, so it is read without a copy. Invariant: the result has only the declared names, and no
byte belongs to two of them.

Shapes: X experts, E embed, F MLP.
"""

from collections.abc import Iterator
from dataclasses import replace

from cadenza.checkpoint.declaration import ExpertMLPSpec, LinearSpec, declare_layer
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.tensor_file import TensorEntry
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError


def split_stacked_experts(config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with stacked experts renamed to the declared tensors; others are unchanged.

    Raises:
        CheckpointError: a stacked tensor has the wrong shape, or an expert is stored twice.
    """
    parts: dict[str, list[TensorEntry]] = {}
    for index in range(config.num_layers):
        mlp = declare_layer(config, index).mlp
        if isinstance(mlp, ExpertMLPSpec):
            parts |= _parts_of_layer(f"model.layers.{index}.mlp", mlp, weights)
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
) -> dict[str, list[TensorEntry]]:
    """The parts of each stacked tensor of a layer, by its name; empty if none is stacked."""
    gate_ups = [each for expert in mlp.experts for each in expert.gate_up]
    downs = [expert.down for expert in mlp.experts]
    stored = {f"{prefix}.experts.gate_up_proj": gate_ups, f"{prefix}.experts.down_proj": downs}
    parts: dict[str, list[TensorEntry]] = {}
    for name, linears in stored.items():
        if name in weights:
            num_out = sum(linear.num_out for linear in linears) // len(mlp.experts)
            shape = (len(mlp.experts), num_out, linears[0].num_in)
            parts[name] = list(_cut(weights.entry(name), linears, shape))
    router = f"{prefix}.gate.weight"
    if parts and router in weights and router != mlp.router.weight:
        parts[router] = [replace(weights.entry(router), name=mlp.router.weight)]
    return parts


def _cut(
    entry: TensorEntry, linears: list[LinearSpec], shape: tuple[int, ...]
) -> Iterator[TensorEntry]:
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
