"""`DraftPlan`: a model beside the one that is served, one that drafts or scores prompts.

Pure values and arithmetic. Invariant: its pages have the ids of the first's, so that each page of
the pool has room for both.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cadenza.backends.base import ModelMemory
from cadenza.checkpoint import Checkpoint
from cadenza.checkpoint.dtypes import WeightDType
from cadenza.config import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A second model for drafts, or to score prompts, whose pages have the ids of the first's.

    Args:
        name: for people.
        context: tokens of a stream, at most.
        shares_kv: it computes on the KV of the model that it drafts for.
        reads_hidden: it reads the hidden states of that model, and shares its embedding and head.
        kv_bytes_per_token: with the hidden states that are kept for it; 0 if it has no KV.
    """

    name: str
    checkpoint: Checkpoint = field(repr=False, compare=False)
    dtype: WeightDType
    quantization: Quantization
    context: int
    shares_kv: bool
    reads_hidden: bool = False
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """What is planned beside a model: one that drafts and one that scores prompts, if the options
    name them, and the bytes of all bodies that a server reads at the same time."""

    draft: DraftPlan | None = None
    scorer: DraftPlan | None = None
    bodies_bytes: int = 0


def beside_others(memory: ModelMemory, others: Iterable[DraftPlan]) -> ModelMemory:
    """The memory of a model and of others whose pages have the same ids."""
    for each in others:
        memory = replace(
            memory,
            weight_bytes=memory.weight_bytes + each.weight_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token + each.kv_bytes_per_token,
        )
    return memory
