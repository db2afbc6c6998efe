"""The bound of a figure: what a step must read and multiply, over what the machine can do.

Pure arithmetic over a model's shape. Knows no engine and measures nothing. Counted are the matrix
products' weights, once for each step, the KV of the rows' contexts, and the operations of both (a
multiplication and its sum are two). Not counted are norms, biases, activations and the embedding
rows, which are below one per cent; so the bound is a little generous and a share a little low.
"""

from dataclasses import dataclass
from typing import Literal, Self

from cadenza.checkpoint import ModelConfig, declare
from cadenza.checkpoint.declaration import HEAD

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
"""Of weights and KV as they are loaded."""

Limit = Literal["read", "multiply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What the machine can do at most, and how that was found."""

    read_gb_s: float
    gflop_s: float
    dtype: str
    method: str

    def better_of(self, other: "Roofline") -> "Roofline":
        """The higher of each, for two measurements of one machine."""
        return Roofline(
            read_gb_s=max(self.read_gb_s, other.read_gb_s),
            gflop_s=max(self.gflop_s, other.gflop_s),
            dtype=self.dtype,
            method=self.method,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A model's part in the bound.

    Args:
        layer_parameters: of all layers' matrix products.
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

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> Self:
        """Of a shape whose weights and KV are `dtype`."""
        item_bytes = ITEM_BYTES[dtype]
        return cls(
            layer_parameters=sum(
                spec.num_elements
                for spec in declare(config)
                if spec.kind == "linear" and spec.name != HEAD
            ),
            head_parameters=config.vocab_size * config.hidden_size,
            pair_operations=4 * config.query_size * config.num_layers,
            item_bytes=item_bytes,
            kv_bytes_per_token=2 * config.num_layers * config.kv_size * item_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        return (self.layer_parameters + self.head_parameters) * self.item_bytes

    def decode_step(self, rows: int, context: float) -> Work:
        """One token for each row; `context` is a row's average KV length, its own included."""
        parameters = self.layer_parameters + self.head_parameters
        return Work(
            read_bytes=self.weight_bytes + rows * context * self.kv_bytes_per_token,
            operations=rows * (2 * parameters + context * self.pair_operations),
        )

    def prefill(self, prompts: Prompts) -> Work:
        """All steps together; the head works once for each prompt, and is read once each step."""
        pairs = prompts.count * prompts.length * (prompts.length + 1) // 2
        return Work(
            read_bytes=prompts.num_steps * self.weight_bytes
            + prompts.num_tokens * self.kv_bytes_per_token,
            operations=2 * self.layer_parameters * prompts.num_tokens
            + 2 * self.head_parameters * prompts.count
            + pairs * self.pair_operations,
        )
