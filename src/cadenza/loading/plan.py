"""`EnginePlan`: resolves options, checkpoint and memory to concrete limits.

Pure arithmetic; allocates and loads nothing. Invariants: a plan fits the memory that it was made
for; one request of `max_model_len` tokens fits the pool of `make_plan`. `with_pool` makes the pool
smaller where the requests are known in advance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from cadenza.backends.base import BackendTraits, KVArrangement, ModelMemory
from cadenza.checkpoint import Checkpoint, ModelConfig, declare
from cadenza.checkpoint.declaration import declare_embedding
from cadenza.checkpoint.dtypes import WeightDType, item_bytes
from cadenza.checkpoint.split import split_model
from cadenza.checkpoint.tensor_formats import held_formats, stored_bytes
from cadenza.config import (
    PAGE_SIZE_UNIT,
    EngineConfig,
    EngineLimits,
    KVCacheDType,
    Quantization,
)
from cadenza.core.scoring_queue import MAX_SCORINGS
from cadenza.core.whole_spans import least_budget
from cadenza.errors import ConfigError, show_size
from cadenza.loading.footprint import QUEUED_PER_ROW, Footprint, QueueBounds, footprint_of
from cadenza.loading.image_memory import image_memory_of, plan_images
from cadenza.loading.second_models import DraftPlan, ExtraMemory, beside_others
from cadenza.loading.space import (
    Space,
    bytes_left,
    check_base,
    check_compiled,
    check_positions,
    check_rows,
    choose_context,
    choose_rows,
    default_step_tokens,
    largest_context,
    pool_tokens,
    state_slots,
)
from cadenza.request import Request
from cadenza.sparse_prefill import LOOK_AHEAD

SMALLEST_POOL = 1024
"""Tokens of the smallest pool that `pages_for_batch` asks for."""


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
    queue_bytes: int = 0
    """Of the requests that wait, beyond those that rows have room for."""
    rows_reason: str | None = None
    """Why `max_num_seqs` is what it is, where none was asked for, or more."""

    @property
    def scratch_bytes(self) -> int:
        """Of all that lasts beside weights and KV, or a step: rows, logits, requests."""
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
        """What both processes take at most, without the headroom. Of a device with memory of its
        own: what is taken there."""
        return (
            self.weight_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.image_bytes
            + self.draft_bytes
            + self.scorer_bytes
            + self.scratch_bytes
            + self.footprint.process_bytes
            + self.footprint.front_end_bytes
            + self.footprint.bodies_bytes
        )

    @property
    def start_bytes(self) -> int:
        """Of `planned_bytes`, those that are resident before the first request comes, at most."""
        limits = self.limits
        others = [each for each in (self.draft, self.scorer) if each is not None]
        second_bytes = sum(each.weight_bytes for each in others)
        own_bytes = self.kv_bytes + self.state_bytes + self.image_bytes
        filled_bytes = own_bytes + self.draft_bytes + self.scorer_bytes - second_bytes
        return (
            self.weight_bytes
            + second_bytes
            + (filled_bytes if self.traits.fills_kv else 0)
            + self.footprint.start_bytes(
                num_rows=limits.max_num_seqs, num_step_tokens=limits.max_num_batched_tokens
            )
            + self.footprint.process_bytes
            + self.footprint.front_end_bytes
        )

    @property
    def reserved_bytes(self) -> int:
        """Of `planned_bytes`, those that become resident as requests use them."""
        return self.planned_bytes - self.start_bytes

    @property
    def draft_limits(self) -> EngineLimits:
        """Of the draft model's runner, whose pages have the ids of the target's."""
        draft, limits = self.draft, self.limits
        assert draft is not None
        context = min(draft.context, limits.max_model_len)
        if draft.shares_kv:  # it computes one token of each row
            return replace(limits, max_num_batched_tokens=limits.max_num_seqs)
        return replace(limits, max_model_len=context, num_state_slots=0)

    @property
    def scorer_limits(self) -> EngineLimits:
        """Of the runner of the model that scores prompts: a row for each that is scored at the same
        time. Its context holds the longest prompt and what is drawn behind it."""
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

    @property
    def draft_bytes(self) -> int:
        """Weights and KV of the draft model."""
        return self._bytes_beside(self.draft)

    @property
    def scorer_bytes(self) -> int:
        """Weights and KV of the model that scores prompts."""
        return self._bytes_beside(self.scorer)

    def _bytes_beside(self, other: DraftPlan | None) -> int:
        if other is None:
            return 0
        num_slots = self.limits.num_pages * self.limits.page_size
        return other.weight_bytes + num_slots * other.kv_bytes_per_token

    @property
    def keeps_hidden(self) -> bool:
        """Whether the model's runner keeps hidden states, for the one that drafts."""
        return self.draft is not None and self.draft.reads_hidden

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.limits.num_pages * self.limits.page_size

    @property
    def state_bytes(self) -> int:
        """Of all slots of recurrent states, those of snapshots among them."""
        return self.state_bytes_per_slot * self.limits.num_state_slots

    @property
    def weights_name(self) -> str:
        """The type of most weights."""
        own = self.scheme or self.dtype
        return own if self.quantization == "none" else self.quantization

    @property
    def is_quantised(self) -> bool:
        """Whether products have int8 activations, at least some of them."""
        return self.quantization != "none" or self.has_codes

    @property
    def kv_name(self) -> str:
        """The type of keys and values."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def summary(self) -> str:
        """One line for the log."""
        limits, traits = self.limits, self.traits
        return (
            f"{traits.name} with {traits.ops} ops, exactness {traits.exactness}: "
            f"{show_size(self.weight_bytes)} of {self.weights_name} weights, "
            f"{show_size(self.kv_bytes)} of {self.kv_name} KV cache{self._state_summary}"
            f"{self._image_summary}, "
            f"{limits.max_num_seqs} rows{self._rows_summary}, "
            f"context of {limits.max_model_len} tokens{self._draft_summary}"
            f"{self._scorer_summary}; "
            f"{show_size(self.planned_bytes)} planned in all, {show_size(self.start_bytes)} of "
            f"them resident at the start"
        )

    @property
    def _state_summary(self) -> str:
        if not self.state_bytes:
            return ""
        return f", {show_size(self.state_bytes)} of {self.limits.num_state_slots} states"

    @property
    def _image_summary(self) -> str:
        if not self.num_image_slots:
            return ""
        return f", {show_size(self.image_bytes)} for {self.num_image_slots} tokens of images"

    @property
    def _rows_summary(self) -> str:
        return "" if self.rows_reason is None else f" (auto: {self.rows_reason})"

    @property
    def _draft_summary(self) -> str:
        if self.draft is None:
            return ""
        return f"; drafts by {self.draft.name}: {show_size(self.draft_bytes)}"

    @property
    def _scorer_summary(self) -> str:
        if self.scorer is None:
            return ""
        return f"; prompts scored by {self.scorer.name}: {show_size(self.scorer_bytes)}"


def make_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    traits: BackendTraits,
    available_bytes: int,
    extra: ExtraMemory | None = None,
) -> EnginePlan:
    """Resolves every `None` and `auto` of `config`.

    Raises:
        ConfigError: the model or the requested sizes do not fit; the message has both numbers.
    """
    extra = extra or ExtraMemory()
    draft, scorer = extra.draft, extra.scorer
    dtype = choose_dtype(config, checkpoint, traits)
    quantization = choose_quantization(config, checkpoint, traits)
    _check_options(config, checkpoint, traits)
    kv_layout = _choose_layout(config, traits)
    config = replace(config, kv_layout=kv_layout, quantization=quantization)
    own_memory = memory_of(checkpoint, traits, dtype, config)
    others = [each for each in (draft, scorer) if each is not None]
    memory = beside_others(own_memory, others)
    footprint = footprint_of(checkpoint, traits, dtype, memory, extra.bodies_bytes)
    footprint = footprint.beside(len(others))
    images = plan_images(checkpoint, traits, memory, config.image_cache_bytes)
    space = Space(
        config=config,
        available_bytes=available_bytes,
        headroom_bytes=int(config.scheduler_headroom_gb * 1e9),
        weight_bytes=memory.weight_bytes,
        weights_name=_weights_name(checkpoint, dtype, quantization),
        kv_bytes_per_token=memory.kv_bytes_per_token,
        terms=footprint,
        context=config.max_model_len or 1,
        budget=traits.max_num_batched_tokens,
        is_dense=kv_layout == "dense",
        state_bytes=memory.state_bytes,
        whole_span=traits.whole_span,
        image_bytes=images.num_bytes,
    )
    limits, rows_reason = _divide(space, config, checkpoint, traits, dtype)
    queue = QueueBounds.of(config, available_bytes, bytes_left(space, limits))
    limits = queue.bound(replace(limits, images=images.limits))
    check_compiled(limits, traits.compiled_for)
    _check_page_folder(config, traits, limits)
    _check_whole_span(traits, limits)
    return EnginePlan(
        limits=limits,
        dtype=dtype,
        quantization=quantization,
        scheme=None if checkpoint.scheme is None else checkpoint.scheme.name,
        kv_cache_dtype=config.kv_cache_dtype,
        has_codes=checkpoint.is_known and checkpoint.weights.has_codes,
        kv_layout=kv_layout,
        weight_bytes=own_memory.weight_bytes,
        kv_bytes_per_token=own_memory.kv_bytes_per_token,
        state_bytes_per_slot=memory.state_bytes,
        image_bytes=images.num_bytes,
        num_image_slots=images.num_slots,
        available_bytes=available_bytes,
        headroom_bytes=space.headroom_bytes,
        footprint=footprint.at(limits.max_model_len, config.page_size),
        traits=traits,
        draft=draft,
        scorer=scorer,
        queue_bytes=queue.num_bytes if traits.device_memory_bytes is None else 0,
        rows_reason=rows_reason,
    )


def _weights_name(checkpoint: Checkpoint, dtype: WeightDType, quantization: Quantization) -> str:
    """The type of most weights, in messages."""
    if quantization != "none":
        return quantization
    return dtype if checkpoint.scheme is None else checkpoint.scheme.name


def _check_options(config: EngineConfig, checkpoint: Checkpoint, traits: BackendTraits) -> None:
    _check_choice("--kv-cache-dtype", config.kv_cache_dtype, traits.kv_cache_dtypes, traits)
    _check_arithmetic(config, traits)
    if config.tensor_parallel_size is not None:
        split_model(checkpoint.config, config.tensor_parallel_size)
    _check_speculation(config, traits)


def _check_whole_span(traits: BackendTraits, limits: EngineLimits) -> None:
    """Raises ConfigError if an image that a step computes whole may not fit one."""
    least = least_budget(traits.whole_span, limits.max_num_seqs)
    if traits.whole_span and limits.max_num_batched_tokens < least:
        raise ConfigError(
            f"--max-num-batched-tokens {limits.max_num_batched_tokens} is too few: an image of "
            f"this model has up to {traits.whole_span} tokens, which a step computes together, "
            f"beside one of each other of --max-num-seqs {limits.max_num_seqs} rows; set "
            f"--max-num-batched-tokens {least}, or --no-images"
        )


def device_share(config: EngineConfig, traits: BackendTraits) -> int | None:
    """Bytes for the engine of a device that has memory of its own; None of one that has not.

    Raises:
        ConfigError: a share was asked for that there is not.
    """
    share, allocator_bytes = config.gpu_memory_utilization, traits.device_memory_bytes
    if share is None:
        return allocator_bytes
    if allocator_bytes is None or traits.device_total_bytes is None:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is a share of a GPU's memory, and {traits.name} "
            f"uses host memory or does not report its own; set --kv-cache-memory-bytes, or leave "
            f"the flag out"
        )
    wanted = int(share * traits.device_total_bytes)
    # The allocator rounds to whole pages of the device.
    if wanted > allocator_bytes + traits.device_total_bytes // 1000:
        fraction = floor(1000 * allocator_bytes / traits.device_total_bytes) / 1000
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is {show_size(wanted)}, but this process can "
            f"allocate {show_size(allocator_bytes)} of the device's "
            f"{show_size(traits.device_total_bytes)}: a variable of the "
            f"environment (XLA_CLIENT_MEM_FRACTION) or an earlier engine said so; set "
            f"--gpu-memory-utilization {fraction:g}"
        )
    return min(wanted, allocator_bytes)


def _divide(
    space: Space,
    config: EngineConfig,
    checkpoint: Checkpoint,
    traits: BackendTraits,
    dtype: WeightDType,
) -> tuple[EngineLimits, str | None]:
    """The limits that fit, and why it is so many rows where none were asked for.

    Raises ConfigError if what was asked for does not fit.
    """

    def coarser(quantization: Quantization) -> int | None:
        """Bytes of the weights in another quantization; None if it would not be coarser."""
        is_fixed = checkpoint.scheme is not None or traits.memory is not None
        if is_fixed or quantization not in traits.quantizations:
            return None
        other = replace(config, quantization=quantization)
        num_bytes = memory_of(checkpoint, traits, dtype, other).weight_bytes
        own_bytes = memory_of(checkpoint, traits, dtype, config).weight_bytes
        return space.weight_bytes - own_bytes + num_bytes if num_bytes < own_bytes else None

    trained = checkpoint.outline.max_position_embeddings
    usual = min(trained, traits.default_max_model_len or trained)
    asked = config.max_model_len
    check_positions(asked, trained)
    space = space.at(asked or min(usual, config.page_size))
    check_base(space, coarser)
    num_rows, reason = config.max_num_seqs, None
    if num_rows is None:
        context = asked or largest_context(space, 1, usual)
        num_rows, reason = choose_rows(space.at(context), context)
    most = traits.compiled_for
    if most is not None and num_rows > most.num_rows:
        num_rows, reason = most.num_rows, "the compiled modules have no more"
    check_rows(space, num_rows)
    num_tokens = pool_tokens(space, num_rows)
    if asked is None:
        space = space.at(largest_context(space, num_rows, usual))
        num_tokens = pool_tokens(space, num_rows)
    max_model_len = choose_context(space, num_rows, num_tokens)
    limits = _limits(config, traits, num_rows, max_model_len, num_tokens)
    pool_bytes = limits.num_pages * limits.page_size * space.slot_bytes
    num_slots = state_slots(space, num_rows, pool_bytes)
    return replace(limits, num_state_slots=num_slots), reason


def with_pool(plan: EnginePlan, config: EngineConfig, num_pages: int) -> EnginePlan:
    """The plan with a pool of at most `num_pages`, unless `config` sets its size.

    All other limits stay, since results may depend on them (LongRoPE's factors follow
    `max_model_len`).
    """
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
    """`pages_at_once`, rounded up to a power of two of at least `SMALLEST_POOL` tokens.

    Programs are compiled for the size of the pool. Few sizes mean that the next requests find
    theirs in the compilation cache.
    """
    smallest = -(-SMALLEST_POOL // limits.page_size)
    return 1 << (max(smallest, pages_at_once(requests, limits)) - 1).bit_length()


def _max_num_tokens(request: Request, limits: EngineLimits) -> int:
    max_tokens = request.params.max_tokens
    wanted = len(request.prompt_token_ids) + (max_tokens or 0)
    return limits.max_model_len if max_tokens is None else min(wanted, limits.max_model_len)


def choose_dtype(
    config: EngineConfig, checkpoint: Checkpoint, traits: BackendTraits
) -> WeightDType:
    if config.dtype == "auto":
        return traits.dtype_for[checkpoint.outline.dtype]
    _check_choice("--dtype", config.dtype, traits.dtypes, traits)
    return config.dtype


def choose_quantization(
    config: EngineConfig, checkpoint: Checkpoint, traits: BackendTraits
) -> Quantization:
    if config.quantization != "none" and checkpoint.scheme is not None:
        raise ConfigError(
            f"--quantization {config.quantization}: the checkpoint is already quantised as "
            f"{checkpoint.scheme.name}; leave the flag out, or use the unquantised checkpoint"
        )
    _check_choice("--quantization", config.quantization, traits.quantizations, traits)
    return config.quantization


def _check_choice(flag: str, value: str, allowed: Sequence[str], traits: BackendTraits) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value} is not one of {', '.join(allowed)} on {traits.name}")


def _check_arithmetic(config: EngineConfig, traits: BackendTraits) -> None:
    if config.arithmetic not in traits.arithmetics:
        raise ConfigError(
            f"--arithmetic {config.arithmetic} is not one of {', '.join(traits.arithmetics)} on "
            f"{traits.name} with {traits.ops} ops; the native CPU kernels have it"
        )


def _check_page_folder(config: EngineConfig, traits: BackendTraits, limits: EngineLimits) -> None:
    if config.prefix_cache_disk is None:
        if config.prefix_cache_disk_bytes is not None:
            raise ConfigError(
                "--prefix-cache-disk-bytes changes nothing without --prefix-cache-disk; name a "
                "folder, or leave it out"
            )
        return
    if "page_copies" not in traits.capabilities:
        raise ConfigError(
            f"--prefix-cache-disk needs pages that can be copied to the host; {traits.name} does "
            f"not support that; leave the flag out"
        )
    if not limits.enable_prefix_caching or limits.slot_unit is not None:
        raise ConfigError(
            "--prefix-cache-disk stores what the prefix cache finds in pages; leave out "
            "--no-enable-prefix-caching and --kv-layout dense"
        )
    if limits.prefix_cache_memory_share == 0.0:
        raise ConfigError(
            "--prefix-cache-disk stores what the prefix cache holds; it holds nothing with "
            "--prefix-cache-memory-share 0"
        )


def _check_speculation(config: EngineConfig, traits: BackendTraits) -> None:
    if config.speculation is not None and "drafts" not in traits.capabilities:
        raise ConfigError(
            f"--speculative-config is not supported on {traits.name}, which verifies no drafts; "
            f"leave it out"
        )


def _choose_layout(config: EngineConfig, traits: BackendTraits) -> KVArrangement:
    if config.kv_layout == "auto":
        return traits.kv_layouts[0]
    _check_choice("--kv-layout", config.kv_layout, ("auto", *traits.kv_layouts), traits)
    return config.kv_layout


def memory_of(
    checkpoint: Checkpoint, traits: BackendTraits, dtype: WeightDType, config: EngineConfig
) -> ModelMemory:
    """The model's memory as the backend states it, or as it follows from its arithmetic."""
    if traits.memory is not None:
        return traits.memory[dtype]
    model = checkpoint.config
    _check_latents(model, config)
    return ModelMemory(
        weight_bytes=stored_bytes(
            declare(model), dtype, config.quantization, held_formats(model, checkpoint.weights)
        )
        + _copied_bytes(model, dtype, config),
        kv_bytes_per_token=model.kv_bytes_per_token(dtype, config.kv_cache_dtype),
        row_bytes=0,
        scratch_bytes=0,
        state_bytes=model.state_bytes(dtype),
        **image_memory_of(model, dtype),
    )


def _copied_bytes(model: ModelConfig, dtype: WeightDType, config: EngineConfig) -> int:
    """Of the weights that each device has whole where several share a model: all but the first."""
    num_copies = (config.tensor_parallel_size or 1) - 1
    return num_copies * declare_embedding(model).num_elements * item_bytes(dtype)


def _check_latents(model: ModelConfig, config: EngineConfig) -> None:
    if model.latent is not None and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is not supported for models of type "
            f"{model.family}, whose pages hold latents in place of keys and values; leave it at "
            f"auto"
        )


def _limits(
    config: EngineConfig,
    traits: BackendTraits,
    num_rows: int,
    max_model_len: int,
    num_tokens: int,
) -> EngineLimits:
    page_size, num_pages = config.page_size, config.num_pages
    token_budget = default_step_tokens(traits.max_num_batched_tokens, traits.whole_span, num_rows)
    slot_unit = traits.slot_unit if config.kv_layout == "dense" else None
    if config.kv_layout == "dense":
        page_size = -(-max_model_len // PAGE_SIZE_UNIT) * PAGE_SIZE_UNIT
        num_pages = num_rows
    elif num_pages is None:
        useful = num_rows * -(-max_model_len // page_size)
        budgeted = num_tokens // page_size
        num_pages = budgeted if config.kv_cache_memory_bytes else min(useful, budgeted)
    return EngineLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens or token_budget,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_num_queued_reqs=QUEUED_PER_ROW * num_rows,
        max_consecutive_step_errors=config.max_consecutive_step_errors,
        enable_prefix_caching=config.enable_prefix_caching
        and (config.kv_layout != "dense" or slot_unit is not None),
        prefix_cache_memory_share=config.prefix_cache_memory_share,
        state_snapshot_interval=config.state_snapshot_interval,
        slot_unit=slot_unit,
    )
