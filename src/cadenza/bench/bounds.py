"""The bound of a figure: what a step must read and multiply, over what the machine can do.

Pure arithmetic over a model's shape. Knows no engine and measures nothing. Counted are the matrix
products' weights, once for each step, the KV of the rows' contexts, and the operations of both (a
multiplication and its sum are two). Not counted are norms, biases, activations and the embedding
rows, which are below one per cent; so the bound is a little generous and a share a little low.

Of a mixture, a token is multiplied with its own experts only, and a step reads each expert at most
once. Which ones the tokens choose is not known beforehand: counted are the most that a step of T
tokens can need, min(X, T A) of X experts in each layer where a token chooses A. Tokens that choose
the same experts let a step read less than that, so a share can pass 100 %.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from cadenza.checkpoint import ModelConfig, declare
from cadenza.checkpoint.declaration import HEAD
from cadenza.checkpoint.dtypes import WeightDType, item_bytes

Limit = Literal["read", "multiply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What the machine can do at most, and how that was found."""

    read_gb_s: float
    gflop_s: float
    dtype: str
    method: str

    @classmethod
    def median_of(cls, found: Sequence["Roofline"]) -> Self:
        """Of measurements of one machine, each rate on its own."""
        return cls(
            read_gb_s=statistics.median(each.read_gb_s for each in found),
            gflop_s=statistics.median(each.gflop_s for each in found),
            dtype=found[0].dtype,
            method=found[0].method,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes to be read and operations to be done."""

    read_bytes: float
    operations: float

    def bound_s(self, roofline: Roofline) -> float:
        """The least time it can take."""
        return max(self._read_s(roofline), self._multiply_s(roofline))

    def limit(self, roofline: Roofline) -> Limit:
        """Which of the two takes longer."""
        return "read" if self._read_s(roofline) >= self._multiply_s(roofline) else "multiply"

    def _read_s(self, roofline: Roofline) -> float:
        return self.read_bytes / (roofline.read_gb_s * 1e9)

    def _multiply_s(self, roofline: Roofline) -> float:
        return self.operations / (roofline.gflop_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of one length that go through in steps of a token budget."""

    count: int
    length: int
    token_budget: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.length

    @property
    def num_steps(self) -> int:
        return -(-self.num_tokens // self.token_budget)

    @property
    def step_sizes(self) -> list[int]:
        """Tokens of each step."""
        whole, rest = divmod(self.num_tokens, self.token_budget)
        return [self.token_budget] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCost:
    """The experts' part in a model's cost; `parameters` are of one expert in all layers."""

    parameters: int
    num_experts: int
    num_chosen: int

    @property
    def token_parameters(self) -> int:
        """What one token is multiplied with."""
        return self.num_chosen * self.parameters

    def most_read_by(self, num_tokens: int) -> int:
        """The most parameters that a step of so many tokens can need."""
        return min(self.num_experts, num_tokens * self.num_chosen) * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A model's part in the bound.

    Args:
        layer_parameters: of all layers' matrix products but the experts'.
        head_parameters: of the vocabulary head, the embedding where they are tied.
        pair_operations: of attention for one query and one token of its context, in all layers.
        item_bytes: of a weight.
        kv_bytes_per_token: of one token's keys and values in all layers.
    """

    layer_parameters: int
    head_parameters: int
    pair_operations: int
    item_bytes: int
    kv_bytes_per_token: int
    experts: ExpertsCost | None = None

    @classmethod
    def of(cls, config: ModelConfig, dtype: WeightDType) -> Self:
        """Of a shape whose weights and KV are `dtype`."""
        experts = _experts_cost(config)
        all_experts = experts.most_read_by(experts.num_experts) if experts else 0
        return cls(
            layer_parameters=sum(
                spec.num_elements
                for spec in declare(config)
                if spec.kind == "linear" and spec.name != HEAD
            )
            - all_experts,
            experts=experts,
            head_parameters=config.vocab_size * config.hidden_size,
            pair_operations=4 * config.query_size * config.num_layers,
            item_bytes=item_bytes(dtype),
            kv_bytes_per_token=config.kv_bytes_per_token(dtype),
        )

    def weight_bytes(self, num_tokens: int) -> int:
        """The most that a step of so many tokens reads."""
        experts = self.experts.most_read_by(num_tokens) if self.experts else 0
        return (self.layer_parameters + experts + self.head_parameters) * self.item_bytes

    @property
    def token_parameters(self) -> int:
        """What one token is multiplied with in all layers."""
        return self.layer_parameters + (self.experts.token_parameters if self.experts else 0)

    def decode_step(self, rows: int, context: float) -> Work:
        """One token for each row; `context` is a row's average KV length, its own included."""
        parameters = self.token_parameters + self.head_parameters
        return Work(
            read_bytes=self.weight_bytes(rows) + rows * context * self.kv_bytes_per_token,
            operations=rows * (2 * parameters + context * self.pair_operations),
        )

    def prefill(self, prompts: Prompts) -> Work:
        """All steps together; the head works once for each prompt, and is read once each step."""
        pairs = prompts.count * prompts.length * (prompts.length + 1) // 2
        return Work(
            read_bytes=sum(map(self.weight_bytes, prompts.step_sizes))
            + prompts.num_tokens * self.kv_bytes_per_token,
            operations=2 * self.token_parameters * prompts.num_tokens
            + 2 * self.head_parameters * prompts.count
            + pairs * self.pair_operations,
        )


def _experts_cost(config: ModelConfig) -> ExpertsCost | None:
    if config.experts is None:
        return None
    num_layers = sum(kind.has_experts for kind in config.layer_kinds)
    return ExpertsCost(
        parameters=3 * num_layers * config.hidden_size * config.experts.intermediate_size,
        num_experts=config.experts.num_experts,
        num_chosen=config.experts.num_chosen,
    )
