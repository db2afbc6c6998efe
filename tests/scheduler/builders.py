"""Small makers of core objects for the tests of the core."""

import random
from typing import Any

import numpy as np

from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import StepOutput
from cadenza.config import EngineLimits
from cadenza.events import Event
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.admission import Admission
from cadenza.scheduler.fair_share import FairShare
from cadenza.scheduler.scheduler import Scheduler, SchedulerOptions
from cadenza.scheduler.step_drafts import StepDrafts
from cadenza.scheduler.step_work import StepWork
from cadenza.scheduler.turns import FCFS, TurnPolicy, Turns

SECRET = b"a secret of the core's own tests"


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"prompt {seed}")
    return tuple(rng.choices(range(50), k=length))


def sequence_of(
    request_id: int,
    prompt: tuple[int, ...] | int,
    *,
    max_tokens: int = 100,
    salt: str = "",
    params: SamplingParams | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
) -> Sequence:
    if isinstance(prompt, int):
        prompt = prompt_of(prompt, request_id)
    return Sequence(
        request_id=request_id,
        request=Request(
            prompt_token_ids=prompt, params=params or SamplingParams(), cache_salt=salt
        ),
        seed=request_id + 1000,
        max_num_tokens=len(prompt) + max_tokens,
        stop_token_ids=stop_token_ids,
        token_ids=list(prompt),
    )


def limits_of(**limits: Any) -> EngineLimits:
    """Small limits, but for those that are given."""
    return EngineLimits(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 512,
            "page_size": 16,
            "num_pages": 32,
            "max_num_queued_reqs": 100,
            **limits,
        }
    )


def manager_of(num_pages: int, *, caching: bool = True, **limits: Any) -> KVCacheManager:
    limits = {"num_pages": num_pages, "enable_prefix_caching": caching, **limits}
    return KVCacheManager(limits_of(**limits), SECRET)


def scheduler_of(
    *,
    num_pages: int = 32,
    max_num_seqs: int = 4,
    token_budget: int = 16,
    reserved_output: float = 0.5,
    caching: bool = True,
    policy: TurnPolicy = FCFS,
    works: tuple[StepWork, ...] = (),
) -> Scheduler:
    limits = limits_of(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        num_pages=num_pages,
        enable_prefix_caching=caching,
    )
    admission = Admission(page_size=16, reserved_output=reserved_output)
    kv_cache = KVCacheManager(limits, SECRET)
    options = SchedulerOptions(
        policy=policy, works=lambda _: (*works, StepDrafts(limits, kv_cache, None))
    )
    return Scheduler(limits, kv_cache, admission, options)


def packer_of(max_num_seqs: int = 4) -> Packer:
    return Packer(limits_of(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs), 97)


def turns_of(policy: TurnPolicy = FCFS, fair_share: FairShare | None = None) -> Turns:
    scheduler = scheduler_of()
    return Turns(scheduler.limits, scheduler.kv_cache, fair_share or FairShare(), policy)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def shares_of(batch: Batch | None) -> dict[int, int]:
    """How many tokens each request computes in a step."""
    entries = () if batch is None else batch.entries
    return {entry.sequence.request_id: entry.num_new_tokens for entry in entries}


def output_of(batch: Batch, token_id: int = 60, bad_rows: tuple[int, ...] = ()) -> StepOutput:
    """A step's output in which every row samples `token_id`; `bad_rows` are not finite."""
    rows = [entry.row for entry in batch.entries for _ in entry.prompt_rows]
    rows += [entry.row for entry in batch.entries for _ in range(entry.num_choices)]
    count = len(rows)
    return StepOutput(
        token_ids=np.full(count, token_id, np.int32),
        has_choice=np.ones(count, np.bool_),
        is_finite=np.array([row not in bad_rows for row in rows], np.bool_),
        logprobs=np.zeros(count, np.float32),
        ranks=np.ones(count, np.int32),
        top_ids=np.zeros((count, 20), np.int32),
        top_logprobs=np.zeros((count, 20), np.float32),
    )


def run_step(scheduler: Scheduler, token_id: int = 60) -> tuple[dict[int, int], list[Event]]:
    """Schedules a step and takes its results at once."""
    batch = scheduler.schedule()
    events = [] if batch is None else scheduler.update(batch, output_of(batch, token_id))
    scheduler.check_invariants()
    return shares_of(batch), events
