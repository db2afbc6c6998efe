"""The modes for images: every chunk size up to a span, and, while an image is being encoded, its
request cancelled and sent again, or its engine lost. A bound of no time cuts encoding into one work
item a step there. Invariant: a stream that was interrupted has every token once.
"""

from dataclasses import dataclass, replace

from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.whole_spans import least_budget
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import Resumption
from cadenza.engine.step_works import WorkOptions
from cadenza.verification.modes import Interruption, Mode
from cadenza.verification.workload import Arrival

LEAST_CHUNK = 16
MOST_CHUNKS = 64  # of sizes that are played; of a longer span, so many of them, its own among them

FEW_REQUESTS = 8  # with images, which the modes of chunk sizes play


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpans:
    """Tokens of the longest image part of a workload; `are_whole`: no step ends inside one."""

    longest: int
    are_whole: bool


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
