"""`make_plan`: resolves options, checkpoint and memory to concrete limits. Pure arithmetic. A plan
fits the memory that it was made for, and one request of `max_model_len` tokens its pool;
`memory_shares` of engines side by side never exceed what is available."""

from collections.abc import Sequence
from dataclasses import replace
from math import floor

from cadenza.backends.base import BackendTraits, KVArrangement, ModelMemory
from cadenza.batch.whole_spans import least_budget
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.tensor_formats import held_formats, stored_bytes
from cadenza.config import (
    PAGE_SIZE_UNIT,
    EngineConfig,
    EngineLimits,
    Quantization,
)
from cadenza.errors import ConfigError, show_size
from cadenza.loading.engine_plan import EnginePlan, ExtraMemory, beside_others
from cadenza.loading.footprint import (
    QUEUED_PER_ROW,
    QueueBounds,
    footprint_of,
    image_memory_of,
    plan_images,
)
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
from cadenza.models.declaration import declare, declare_embedding
from cadenza.models.model_config import ModelConfig
from cadenza.models.split import split_model
from cadenza.weights.weight_format import WeightDType, item_bytes


def make_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    traits: BackendTraits,
    available_bytes: int,
    extra: ExtraMemory | None = None,
) -> EnginePlan:
    """Resolves every `None` and `auto` of `config`. Raises ConfigError, with both numbers, if the
    model or the requested sizes do not fit."""
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
    """Raises ConfigError if an image that a step must compute whole may not fit one."""
    least = least_budget(traits.whole_span, limits.max_num_seqs)
    if traits.whole_span and limits.max_num_batched_tokens < least:
        raise ConfigError(
            f"--max-num-batched-tokens {limits.max_num_batched_tokens} is too few: an image of "
            f"this model has up to {traits.whole_span} tokens, which a step computes together, "
            f"beside one of each other of --max-num-seqs {limits.max_num_seqs} rows; set "
            f"--max-num-batched-tokens {least}, or --no-images"
        )


def device_share(config: EngineConfig, traits: BackendTraits) -> int | None:
    """Bytes for the engine on a device with memory of its own; None for other devices. Raises
    ConfigError for a share where there is no such device."""
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
    """The limits that fit, and why so many rows where none were asked for. Raises ConfigError if
    what was asked for does not fit."""

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
    """Of the weights that every device holds whole where several share a model: all copies but the
    first."""
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


def memory_shares(weight_bytes: Sequence[int], num_engines: int, available_bytes: int) -> list[int]:
    """Each model's bytes: its weights, and an equal share of what the largest `num_engines` models
    leave. Raises ConfigError where these weights alone exceed what is available."""
    ordered = sorted(weight_bytes, reverse=True)
    rest_bytes = available_bytes - sum(ordered[:num_engines])
    if rest_bytes > 0:
        return [each + rest_bytes // num_engines for each in weight_bytes]
    fitting = num_engines
    while fitting > 1 and sum(ordered[:fitting]) >= available_bytes:
        fitting -= 1
    raise ConfigError(
        f"--max-loaded-models {num_engines}: the weights of the {num_engines} largest models take "
        f"{sum(ordered[:num_engines])} bytes, but {available_bytes} are available; set "
        f"--max-loaded-models {fitting}, or choose a --quantization (each of the --replicas of a "
        f"model counts as one)"
    )


def weight_bytes_of(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Approximate bytes of a model's weights; 0 where only a backend can read them."""
    if not checkpoint.is_known:
        return 0
    if config.quantization == "none":
        return checkpoint.num_weight_bytes
    model = checkpoint.config
    formats = held_formats(model, checkpoint.weights)
    return stored_bytes(declare(model), "bfloat16", config.quantization, formats)
