"""`EnginePlan`: the resolved limits and memory of an engine, and `DraftPlan`, of a second model.
Pure values and arithmetic. A second model's pages have the ids of the first's, so each page of the
pool has room for both."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cadenza.backends.base import BackendTraits, KVArrangement, ModelMemory
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig, EngineLimits, KVCacheDType, Quantization
from cadenza.errors import show_size
from cadenza.loading.footprint import Footprint
from cadenza.request import Request
from cadenza.scheduler.scoring_queue import MAX_SCORINGS
from cadenza.sparse_prefill import LOOK_AHEAD
from cadenza.weights.weight_format import WeightDType

SMALLEST_POOL = 1024  # the smallest pool that `pages_for_batch` asks for, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A second model for drafts, or to score prompts, whose pages have the ids of the first's."""

    name: str  # for people
    checkpoint: Checkpoint = field(repr=False, compare=False)
    dtype: WeightDType
    quantization: Quantization
    context: int  # tokens of a stream, at most
    shares_kv: bool  # it computes on the KV of the model that it drafts for
    # it reads the hidden states of that model, and shares its embedding and head
    reads_hidden: bool = False
    weight_bytes: int
    kv_bytes_per_token: int  # with the hidden states that are kept for it; 0 if it has no KV


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """What is planned beside a model: one that drafts, one that scores prompts, and the bytes of
    all request bodies that a server reads at the same time."""

    draft: DraftPlan | None = None
    scorer: DraftPlan | None = None
    bodies_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The resolved limits, data type and memory sizes (bytes) of an engine."""

    limits: EngineLimits
    dtype: WeightDType
    quantization: Quantization = "none"
    scheme: str | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    has_codes: bool = False
    kv_layout: KVArrangement
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_slot: int = 0
    image_bytes: int = 0
    num_image_slots: int = 0
    available_bytes: int
    headroom_bytes: int = 0
    footprint: Footprint = field(default_factory=Footprint)
    traits: BackendTraits
    draft: DraftPlan | None = None
    scorer: DraftPlan | None = None
    queue_bytes: int = 0  # of the requests that wait, beyond those that rows have room for
    # why `max_num_seqs` was chosen so, where it was not given, or is more
    rows_reason: str | None = None

    @property
    def scratch_bytes(self) -> int:
        """What lasts beside weights and KV, or a step: rows, logits, requests."""
        limits = self.limits
        return (
            self.footprint.scratch_bytes(
                num_rows=limits.max_num_seqs,
                num_step_tokens=limits.max_num_batched_tokens,
                num_slots=limits.num_pages * limits.page_size,
            )
            + self.queue_bytes
        )

    @property
    def planned_bytes(self) -> int:
        """What both processes take at most, without the headroom; of a device with memory of its
        own, what is taken there."""
        footprint = self.footprint
        return (
            self.weight_bytes
            + self._pool_bytes
            + sum(each.weight_bytes for each in self._others)
            + self.scratch_bytes
            + footprint.process_bytes
            + footprint.front_end_bytes
            + footprint.bodies_bytes
        )

    @property
    def start_bytes(self) -> int:
        """The part of `planned_bytes` that is resident before the first request comes, at most."""
        limits, footprint = self.limits, self.footprint
        return (
            self.weight_bytes
            + sum(each.weight_bytes for each in self._others)
            + (self._pool_bytes if self.traits.fills_kv else 0)
            + footprint.start_bytes(
                num_rows=limits.max_num_seqs, num_step_tokens=limits.max_num_batched_tokens
            )
            + footprint.process_bytes
            + footprint.front_end_bytes
        )

    @property
    def _others(self) -> list[DraftPlan]:
        return [each for each in (self.draft, self.scorer) if each is not None]

    @property
    def _pool_bytes(self) -> int:
        """KV of all models, recurrent states and images."""
        second_bytes = sum(map(self.kv_bytes_beside, self._others))
        return self.kv_bytes + self.state_bytes + self.image_bytes + second_bytes

    @property
    def reserved_bytes(self) -> int:
        """The part of `planned_bytes` that becomes resident as requests use it."""
        return self.planned_bytes - self.start_bytes

    @property
    def draft_limits(self) -> EngineLimits:
        draft, limits = self.draft, self.limits
        assert draft is not None
        context = min(draft.context, limits.max_model_len)
        if draft.shares_kv:  # it computes one token of each row
            return replace(limits, max_num_batched_tokens=limits.max_num_seqs)
        return replace(limits, max_model_len=context, num_state_slots=0)

    @property
    def scorer_limits(self) -> EngineLimits:
        """The limits of the prompt scorer's runner: a row for each prompt that is scored at the
        same time; its context holds the longest prompt and the tokens drawn after it."""
        scorer, limits = self.scorer, self.limits
        assert scorer is not None
        return replace(
            limits,
            max_num_seqs=MAX_SCORINGS,
            max_num_batched_tokens=max(limits.max_num_batched_tokens, MAX_SCORINGS),
            max_model_len=min(scorer.context, limits.max_model_len + LOOK_AHEAD),
            num_state_slots=0,
            images=None,
        )

    def kv_bytes_beside(self, other: DraftPlan) -> int:
        return self.limits.num_pages * self.limits.page_size * other.kv_bytes_per_token

    @property
    def keeps_hidden(self) -> bool:
        return self.draft is not None and self.draft.reads_hidden

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.limits.num_pages * self.limits.page_size

    @property
    def state_bytes(self) -> int:
        """All slots of recurrent states, snapshots included."""
        return self.state_bytes_per_slot * self.limits.num_state_slots

    @property
    def weights_name(self) -> str:
        own = self.scheme or self.dtype
        return own if self.quantization == "none" else self.quantization

    @property
    def is_quantised(self) -> bool:
        """Whether any products have int8 activations."""
        return self.quantization != "none" or self.has_codes

    @property
    def kv_name(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def summary(self) -> str:
        limits, traits = self.limits, self.traits
        parts = [
            f"{show_size(self.weight_bytes)} of {self.weights_name} weights",
            f"{show_size(self.kv_bytes)} of {self.kv_name} KV cache",
        ]
        if self.state_bytes:
            parts.append(f"{show_size(self.state_bytes)} of {limits.num_state_slots} states")
        if self.num_image_slots:
            images = f"{self.num_image_slots} tokens of images"
            parts.append(f"{show_size(self.image_bytes)} for {images}")
        rows = "" if self.rows_reason is None else f" (auto: {self.rows_reason})"
        parts.append(f"{limits.max_num_seqs} rows{rows}")
        parts.append(f"context of {limits.max_model_len} tokens")
        how = f"{traits.name} with {traits.ops} ops, exactness {traits.exactness}"
        said = [f"{how}: {', '.join(parts)}"]
        for what, other in (("drafts", self.draft), ("prompts scored", self.scorer)):
            if other is not None:
                size = show_size(other.weight_bytes + self.kv_bytes_beside(other))
                said.append(f"{what} by {other.name}: {size}")
        said.append(
            f"{show_size(self.planned_bytes)} planned in all, {show_size(self.start_bytes)} of "
            f"them resident at the start"
        )
        return "; ".join(said)


def beside_others(memory: ModelMemory, others: Iterable[DraftPlan]) -> ModelMemory:
    """The memory of a model and of others whose pages have the same ids."""
    for each in others:
        memory = replace(
            memory,
            weight_bytes=memory.weight_bytes + each.weight_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token + each.kv_bytes_per_token,
        )
    return memory


def with_pool(plan: EnginePlan, config: EngineConfig, num_pages: int) -> EnginePlan:
    """The plan with a pool of at most `num_pages`, unless `config` sets its size. Other limits
    stay, since results may depend on them (LongRoPE's factors follow `max_model_len`)."""
    if config.num_pages is not None or config.kv_cache_memory_bytes is not None:
        return plan
    num_pages = min(plan.limits.num_pages, num_pages)
    return replace(plan, limits=replace(plan.limits, num_pages=num_pages))


def pages_at_once(requests: Iterable[Request], limits: EngineLimits) -> int:
    """Pages for the longest `max_num_seqs` samples of `requests`, as if they shared none."""
    sizes = [
        -(-_max_num_tokens(each, limits) // limits.page_size)
        for each in requests
        for _ in range(each.params.n)
    ]
    return sum(sorted(sizes)[-limits.max_num_seqs :])


def pages_for_batch(requests: Iterable[Request], limits: EngineLimits) -> int:
    """`pages_at_once`, rounded up to a power of two of at least `SMALLEST_POOL` tokens: programs
    are compiled for the size of the pool, and few sizes hit the compilation cache."""
    smallest = -(-SMALLEST_POOL // limits.page_size)
    return 1 << (max(smallest, pages_at_once(requests, limits)) - 1).bit_length()


def _max_num_tokens(request: Request, limits: EngineLimits) -> int:
    max_tokens = request.params.max_tokens
    wanted = len(request.prompt_token_ids) + (max_tokens or 0)
    return limits.max_model_len if max_tokens is None else min(wanted, limits.max_model_len)
