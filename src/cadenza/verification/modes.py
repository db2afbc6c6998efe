"""The verifier's modes: loops, chunk sizes, caches, preemption; for images every chunk size up to a
span, and, while an image is encoded, its request cancelled and sent again, or its engine lost. A
bound of no time cuts encoding into one work item a step there. Invariant: a stream that was
interrupted has every token once."""

from dataclasses import dataclass, replace

from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.whole_spans import least_budget
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import Resumption
from cadenza.engine.step_works import WorkOptions
from cadenza.speculative_config import SpeculativeConfig
from cadenza.verification.play import Interruption, Mode
from cadenza.verification.workload import Arrival

LEAST_CHUNK = 16
MOST_CHUNKS = 64  # of sizes that are played; of a longer span, so many of them, its own among them

FEW_REQUESTS = 8  # with images, which the modes of chunk sizes play


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpans:
    """Tokens of the longest image part of a workload; `are_whole`: no step ends inside one."""

    longest: int
    are_whole: bool


def batched_modes(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[Mode, ...]:
    """The last one needs several pages a sequence: one that has its own slot is never preempted."""
    without_cache = replace(limits, enable_prefix_caching=False)
    smallest = max(limits.max_num_seqs, limits.max_num_batched_tokens // 4)
    midstream = ("admitted_midstream", "rows_reused")
    modes = (
        Mode(name="plain loop", limits=without_cache, loop="plain", shows=midstream),
        Mode(name="overlapped loop", limits=without_cache, shows=midstream),
        Mode(
            name=f"chunks of {smallest}",
            limits=replace(without_cache, max_num_batched_tokens=smallest),
        ),
        Mode(
            name=f"chunks of {smallest + 1}, plain loop",
            limits=replace(
                without_cache,
                max_num_batched_tokens=min(smallest + 1, limits.max_num_batched_tokens),
            ),
            loop="plain",
        ),
    )
    if limits.max_pages_per_seq > 1:
        return modes + _paged_modes(limits, arrivals)
    return modes + _slot_modes(limits)


def with_drafts(
    modes: tuple[Mode, ...], speculation: SpeculativeConfig, shows: str
) -> tuple[Mode, ...]:
    """Steps verify drafts; the second mode `shows` some, accepted ones say."""
    drafting = [replace(mode, speculation=speculation) for mode in modes]
    drafting[1] = replace(drafting[1], shows=(*drafting[1].shows, shows))
    return tuple(drafting)


def with_scores(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    scoring = [*modes]
    scoring[1] = replace(scoring[1], shows=(*scoring[1].shows, "scored"))
    return tuple(scoring)


def _slot_modes(limits: EngineLimits) -> tuple[Mode, ...]:
    """The mode with prefixes that are copied between slots, if the backend can. Snapshots of
    recurrent layers are of complete prompts, of which the workload need not repeat any."""
    if limits.slot_unit is None:
        return ()
    shows = ("cache_hits",) if limits.slot_unit == 1 else ()
    with_cache = replace(limits, enable_prefix_caching=True)
    return (Mode(name="prefix cache, cold then hot", limits=with_cache, rounds=2, shows=shows),)


def _paged_modes(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[Mode, ...]:
    """Modes with shared prefixes, and with a pool so small that sequences are preempted, where
    states have as few slots: one more than rows need, so that a slot is soon another row's."""
    with_cache = replace(limits, enable_prefix_caching=True)
    num_slots = min(limits.num_state_slots, 2 * limits.max_num_seqs + 1)
    few = replace(with_cache, num_state_slots=num_slots)
    tight_with_cache = tuple(
        replace(few, num_pages=pool) for pool in _tight_pools(limits, arrivals)
    )
    tight = tuple(replace(each, enable_prefix_caching=False) for each in tight_with_cache)
    return (
        Mode(
            name="prefix cache, cold then hot",
            limits=with_cache,
            or_serial=True,
            rounds=2,
            shows=("cache_hits",),
        ),
        Mode(
            name="tight pool",
            limits=tight[0],
            alternatives=tight[1:],
            reserved_output=0.0,
            shows=("preempted",),
        ),
        Mode(
            name="tight pool, prefix cache",
            limits=tight_with_cache[0],
            alternatives=tight_with_cache[1:],
            loop="plain",
            reserved_output=0.0,
            rounds=2,
            shows=("preempted",),
        ),
    )


def _tight_pools(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[int, ...]:
    """Pool sizes in pages that should force preemption, from the largest request's need upwards.
    Some fit the longest prompt and one other prompt but none of their generated tokens: with few
    rows, only those are too small for two requests admitted together."""
    prompts = [len(arrival.request.prompt_token_ids) for arrival in arrivals]
    sizes = [
        prompt + (arrival.request.params.max_tokens or 0)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]
    largest = max(-(-size // limits.page_size) for size in sizes)
    pages = [-(-prompt // limits.page_size) for prompt in prompts]
    pools = [largest + largest * quarter // 4 for quarter in range(2 * limits.max_num_seqs)]
    pools += [max(largest, max(pages) + other) for other in pages]
    return tuple(sorted({min(pool, limits.num_pages) for pool in pools}))


def image_modes(
    limits: EngineLimits, arrivals: tuple[Arrival, ...], spans: ImageSpans
) -> tuple[Mode, ...]:
    without_cache = replace(limits, enable_prefix_caching=False)
    with_cache = replace(limits, enable_prefix_caching=True)
    hits = Mode(
        name="images, prefix cache, cold then hot",
        limits=with_cache,
        or_serial=True,
        rounds=2,
        shows=("cache_hits", "hits_in_image"),
    )
    slow = Mode(name="", limits=without_cache, adapt=one_quantum_a_step)
    return (
        *(_chunks_of(size, without_cache, arrivals) for size in _chunk_sizes(spans, limits)),
        hits,
        replace(
            slow,
            name="requests cancelled while their image is encoded",
            interrupt=cancel_and_send_again,
            shows=("interrupted",),
        ),
        replace(
            slow,
            name="engines lost while an image is encoded",
            limits=with_cache,
            interrupt=lose_engine,
            shows=("interrupted",),
        ),
    )


def one_quantum_a_step(options: CoreOptions) -> CoreOptions:
    """With a bound that no step keeps, so that each encodes as little as it may."""
    cost = StepCost(fixed_ms=1.0, token_ms=1.0, logit_ms=0.0, key_ms=0.0)
    return replace(
        options,
        step_bound=StepBound(max_ms=1.0, cost=cost),
        works=WorkOptions(image_cost=ImageCost(quantum_ms=1e9)),
    )


def cancel_and_send_again(at: Interruption) -> EngineCore:
    at.core.cancel(at.request_id)
    at.round.forget(at.request_id)
    request = at.round.arrivals[at.request_id].request
    at.core.resume(at.request_id, request, Resumption(samples=at.round.open_samples(at.request_id)))
    return at.core


def lose_engine(at: Interruption) -> EngineCore:
    """Another engine on the same runner, which has lost everything, goes on with all requests."""
    core, played = at.make_core(), at.round
    for request_id in played.sent:
        samples = played.open_samples(request_id)
        if samples:
            done = played.num_prompt_logprobs(request_id)
            request = played.arrivals[request_id].request
            core.resume(request_id, request, Resumption(samples=samples, num_prompt_logprobs=done))
    return core


def _chunks_of(size: int, limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> Mode:
    """Steps of at most `size` tokens, for the first requests with images."""
    seeing = [index for index, each in enumerate(arrivals) if each.request.attachments]
    return Mode(
        name=f"images in chunks of {size}",
        limits=replace(limits, max_num_batched_tokens=size),
        requests=tuple(seeing[:FEW_REQUESTS]),
    )


def _chunk_sizes(spans: ImageSpans, limits: EngineLimits) -> tuple[int, ...]:
    """From `LEAST_CHUNK`, or a token of each row, to a span; where no step ends inside one, the
    least that holds a span."""
    least = max(LEAST_CHUNK, limits.max_num_seqs)
    most = min(spans.longest, limits.max_num_batched_tokens)
    if spans.are_whole:
        return (least_budget(most, limits.max_num_seqs),)
    if most <= least:
        return (least,)
    step = -(-(most - least) // MOST_CHUNKS)
    return tuple(dict.fromkeys((*range(least, most, step), most)))
