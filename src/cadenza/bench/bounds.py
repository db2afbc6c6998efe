"""The bound of a rate: what a step must read and multiply, over the machine's roofline. Pure
arithmetic over a model's shape. `ModelCost` says what is counted."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

from cadenza.checkpoint.tensor_formats import StoredFormat, stored_bytes
from cadenza.config import KVCacheDType, Quantization
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.operations import (
    expert_tensors,
    head_tensor,
    mixtures_of,
    pair_operations,
)
from cadenza.weights.tensor_spec import TensorSpec, tensors_of
from cadenza.weights.weight_format import WeightDType

Limit = Literal["read", "multiply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The machine's highest rates, and how they were measured (`native` or `numpy`)."""

    read_gb_s: float
    gflop_s: float
    dtype: str
    method: str

    @classmethod
    def median_of(cls, found: Sequence["Roofline"]) -> Self:
        return cls(
            read_gb_s=statistics.median(each.read_gb_s for each in found),
            gflop_s=statistics.median(each.gflop_s for each in found),
            dtype=found[0].dtype,
            method=found[0].method,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes that have to be read, and operations."""

    read_bytes: float
    operations: float

    def bound_s(self, roofline: Roofline) -> float:
        return max(self._read_s(roofline), self._multiply_s(roofline))

    def limit(self, roofline: Roofline) -> Limit:
        """Whether reading or multiplying takes longer."""
        return "read" if self._read_s(roofline) >= self._multiply_s(roofline) else "multiply"

    def _read_s(self, roofline: Roofline) -> float:
        return self.read_bytes / (roofline.read_gb_s * 1e9)

    def _multiply_s(self, roofline: Roofline) -> float:
        return self.operations / (roofline.gflop_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of one length, computed in steps of a token budget."""

    count: int
    length: int
    token_budget: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.length

    @property
    def step_sizes(self) -> list[int]:
        whole, rest = divmod(self.num_tokens, self.token_budget)
        return [self.token_budget] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCost:
    """The experts' part of a model's cost; sizes are of one expert in all its layers."""

    parameters: int
    num_bytes: int
    num_experts: int
    num_chosen: int

    @property
    def token_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.num_chosen * self.parameters

    def read_by(self, num_tokens: int) -> float:
        """Bytes of weights that a step of `num_tokens` tokens needs on average: of X experts of a
        layer where a token chooses A evenly, X (1 - (1 - A / X)^T). Where tokens choose alike a
        step reads less, and a share of the bound can exceed 100 %."""
        unchosen = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * (1 - unchosen) * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A model's part of the bound: the matrix products' weights once a step, the KV of the rows'
    contexts, recurrent states, and the operations of products and attention (a multiplication and
    its sum are two). Norms, biases, activations, recurrences and embedding rows, below one per
    cent together, are not counted. In a mixture a step reads each distinct expert that its tokens
    choose once: those that a run touched, where the kernels counted them, else as `read_by` says.

    Args:
        layer_parameters: of all layers' matrix products, without the experts'.
        head_parameters: of the vocabulary head, or of the embedding that is tied to it.
        pair_operations: attention of one query and one token of its context, in all layers.
        layer_bytes, head_bytes: of their weights as they are held in memory.
        kv_bytes_per_token: one token's keys and values in all layers.
        state_bytes: the recurrent state of a sequence.
        gated_bytes: the part of the layers' that the kernels count with the experts: MLPs for all
            tokens that have a gate.
    """

    layer_parameters: int
    head_parameters: int
    pair_operations: int
    layer_bytes: int
    head_bytes: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    experts: ExpertsCost | None = None
    gated_bytes: int = 0

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: WeightDType,
        quantization: Quantization = "none",
        stored_format: StoredFormat = lambda _: None,
        *,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> Self:
        """Of a shape that computes in `dtype`, with quantised weights and KV, or a checkpoint's
        stored formats."""
        size = partial(
            stored_bytes, dtype=dtype, quantization=quantization, stored_format=stored_format
        )
        experts, head = expert_tensors(config), head_tensor(config)
        apart = {spec.name for expert in experts for spec in expert}
        layers = [
            spec
            for spec in declare(config)
            if spec.kind in ("linear", "router") and spec.name not in apart
        ]
        return cls(
            layer_parameters=sum(spec.num_elements for spec in layers),
            layer_bytes=size(layers),
            experts=_experts_cost(config, experts, size),
            head_parameters=head.num_elements,
            head_bytes=size([head]),
            pair_operations=pair_operations(config),
            kv_bytes_per_token=config.kv_bytes_per_token(dtype, kv_cache_dtype),
            state_bytes=config.state_bytes(dtype),
            gated_bytes=size(_gated_tensors(config)),
        )

    def weight_bytes(self, num_tokens: int, touched_bytes: float | None = None) -> float:
        """Of a step's weights; `touched_bytes`: of the experts that it touched, if they were
        counted."""
        if touched_bytes is None:
            touched_bytes = self.experts.read_by(num_tokens) if self.experts else 0
        else:
            touched_bytes -= self.gated_bytes
        return self.layer_bytes + touched_bytes + self.head_bytes

    @property
    def token_parameters(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return self.layer_parameters + (self.experts.token_parameters if self.experts else 0)

    def decode_step(self, rows: int, context: float, touched_bytes: float | None = None) -> Cost:
        """One token for each row; `context`: average KV length with its own; `touched_bytes` as for
        `weight_bytes`."""
        parameters = self.token_parameters + self.head_parameters
        return Cost(
            read_bytes=self.weight_bytes(rows, touched_bytes)
            + rows * (context * self.kv_bytes_per_token + self.state_bytes),
            operations=rows * (2 * parameters + context * self.pair_operations),
        )

    def prefill(self, prompts: Prompts) -> Cost:
        """All steps together; the head is applied once a prompt and read once a step."""
        pairs = prompts.count * prompts.length * (prompts.length + 1) // 2
        return Cost(
            read_bytes=sum(map(self.weight_bytes, prompts.step_sizes))
            + prompts.num_tokens * self.kv_bytes_per_token
            + prompts.count * self.state_bytes,
            operations=2 * self.token_parameters * prompts.num_tokens
            + 2 * self.head_parameters * prompts.count
            + pairs * self.pair_operations,
        )


def _gated_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Of the MLPs for all tokens that have a gate."""
    return [
        spec
        for mlp in mixtures_of(config)
        if mlp.shared is not None and mlp.shared_gate is not None
        for spec in tensors_of(mlp.shared)
    ]


def _experts_cost(
    config: ModelConfig,
    experts: list[list[TensorSpec]],
    size: Callable[[list[TensorSpec]], int],
) -> ExpertsCost | None:
    if config.experts is None or not experts:
        return None
    return ExpertsCost(
        parameters=sum(spec.num_elements for spec in experts[0]),
        num_bytes=size(experts[0]),
        num_experts=config.experts.num_experts,
        num_chosen=config.experts.num_chosen,
    )
