"""A workload of which some prompts are pruned, for an engine that scores prompts. Pure: which they
are follows from the workload alone.
"""

from dataclasses import replace

from cadenza.request import Request
from cadenza.sparse_prefill import LOOK_AHEAD, SparsePrefill, num_chunks
from cadenza.verification.workload import Arrival

EVERY = 3
"""Of the prompts that can be thinned out, one of so many is not."""


def with_sparse_prompts(arrivals: tuple[Arrival, ...], keep: float) -> tuple[Arrival, ...]:
    """Most of the prompts in which scores decide something keep so much, or as little more as
    leaves a choice."""
    found: list[Arrival] = []
    num_able = 0
    for each in arrivals:
        sparse = _sparse_of(each.request, keep)
        num_able += sparse is not None
        if sparse is not None and num_able % EVERY:
            found.append(replace(each, request=replace(each.request, sparse_prefill=sparse)))
        else:
            found.append(each)
    return tuple(found)


def _sparse_of(request: Request, keep: float) -> SparsePrefill | None:
    params, num_tokens = request.params, len(request.prompt_token_ids)
    needs_all = request.attachments or request.needs_prompt_rows or request.pooling is not None
    if needs_all or params.repetition_penalty != 1.0 or (params.max_tokens or 0) < LOOK_AHEAD:
        return None
    count = num_chunks(num_tokens)
    num_forced = len(SparsePrefill(keep=keep).forced_chunks(num_tokens))
    wanted = max(keep, (num_forced + 1) / count)
    sparse = SparsePrefill(keep=min(1.0, wanted))
    return sparse if num_forced < sparse.num_kept_chunks(num_tokens) < count else None
