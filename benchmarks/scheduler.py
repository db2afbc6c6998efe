"""Host time per step (schedule + pack + update); targets: 150 µs at 8 rows, 1 ms at 256.

    python benchmarks/scheduler.py [--profile]

Runs without a device: sampled tokens are constant. Each figure is the median over the steps of a
repeat, then over the repeats.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import StepOutput
from cadenza.config import EngineLimits
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.admission import Admission
from cadenza.scheduler.scheduler import Scheduler, SchedulerOptions
from cadenza.scheduler.step_drafts import StepDrafts

PAGE_SIZE = 16
NUM_STEPS = 200
NUM_WARM_STEPS = 20
NUM_REPEATS = 7
TARGETS_US = {8: 150.0, 256: 1000.0}


@dataclass(slots=True)
class Cost:
    """Microseconds of host time in one step."""

    schedule: float
    pack: float
    update: float

    @property
    def total(self) -> float:
        return self.schedule + self.pack + self.update


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_rows` decoding rows with `num_prompt_tokens` of context each, and waiting prompts.

    `num_waiting_tokens` is the length of a prompt that is computed in chunks meanwhile.
    `num_blocked_tokens` is that of a prompt which is in the prefix cache, but for which the pages
    of its output are missing in every step.
    """

    name: str
    num_rows: int
    num_prompt_tokens: int = 64
    num_waiting_tokens: int = 0
    num_blocked_tokens: int = 0
    token_budget: int | None = None


class Bench:
    """A scheduler and a packer in the overlapped order: one step is always in flight."""

    def __init__(self, workload: Workload) -> None:
        budget = workload.token_budget or max(workload.num_rows, 64)
        context = workload.num_prompt_tokens + NUM_STEPS + NUM_WARM_STEPS + 600
        pages = -(-context // PAGE_SIZE) * workload.num_rows
        pages += -(-(workload.num_waiting_tokens + workload.num_blocked_tokens) // PAGE_SIZE)
        limits = EngineLimits(
            max_num_seqs=workload.num_rows,
            max_num_batched_tokens=budget,
            max_model_len=context + workload.num_waiting_tokens + workload.num_blocked_tokens,
            page_size=PAGE_SIZE,
            num_pages=pages,
            max_num_queued_reqs=1000,
        )
        kv_cache = KVCacheManager(limits, b"bench")
        options = SchedulerOptions(works=lambda _: (StepDrafts(limits, kv_cache, None),))
        self.scheduler = Scheduler(limits, kv_cache, Admission(page_size=PAGE_SIZE), options)
        self.packer = Packer(limits, 97)
        self.bucket = budget
        if workload.num_blocked_tokens:
            self._add(workload.num_rows, workload.num_blocked_tokens)
            while any(s.num_uncomputed_tokens != 1 for s in self._everybody()):
                self._settle()
            self.scheduler.end(self.scheduler.running[-1])
        for request_id in range(workload.num_rows):
            self._add(request_id, workload.num_prompt_tokens)
        while any(s.num_uncomputed_tokens != 1 for s in self._everybody()):
            self._settle()
        if workload.num_waiting_tokens:
            self.scheduler.end(self.scheduler.running[-1])
            self._add(workload.num_rows, workload.num_waiting_tokens)
        if workload.num_blocked_tokens:
            self.scheduler.end(self.scheduler.running[-1])
            self._add(workload.num_rows, workload.num_blocked_tokens, num_answer_tokens=1 << 20)
        self.in_flight = self._next_batch()
        self.packer.pack(self.in_flight, self.bucket)

    def step(self) -> Cost:
        times = [time.perf_counter()]
        batch = self._next_batch()
        times.append(time.perf_counter())
        self.packer.pack(batch, self.bucket)
        times.append(time.perf_counter())
        output = _output_of(self.in_flight)
        before_update = time.perf_counter()
        self.scheduler.update(self.in_flight, output)
        after_update = time.perf_counter()
        self.in_flight = batch
        return Cost(
            (times[1] - times[0]) * 1e6,
            (times[2] - times[1]) * 1e6,
            (after_update - before_update) * 1e6,
        )

    def _everybody(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _next_batch(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def _settle(self) -> None:
        batch = self._next_batch()
        self.packer.pack(batch, self.bucket)
        self.scheduler.update(batch, _output_of(batch))

    def _add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        num_answer_tokens: int = NUM_STEPS + NUM_WARM_STEPS + 500,
    ) -> None:
        # The first token makes prompts distinct, so that they share no pages.
        prompt = (request_id, *range(1, num_prompt_tokens))
        request = Request(
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=num_answer_tokens),
        )
        self.scheduler.add(
            Sequence(
                request_id=request_id,
                request=request,
                seed=request_id,
                max_num_tokens=num_prompt_tokens + num_answer_tokens,
                stop_token_ids=frozenset({-1}),
                token_ids=list(prompt),
            )
        )


def _output_of(batch: Batch) -> StepOutput:
    count = sum(entry.num_choices for entry in batch.entries)
    return StepOutput(
        token_ids=np.full(count, 7, np.int32),
        is_finite=np.ones(count, np.bool_),
        has_choice=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        ranks=np.ones(count, np.int32),
        top_ids=np.zeros((count, 1), np.int32),
        top_logprobs=np.zeros((count, 1), np.float32),
    )


def measure(workload: Workload) -> Cost:
    """The median over steps, then over repeats, of each part."""
    repeats: list[Cost] = []
    for _ in range(NUM_REPEATS):
        bench = Bench(workload)
        for _ in range(NUM_WARM_STEPS):
            bench.step()
        repeats.append(_median([bench.step() for _ in range(NUM_STEPS)]))
    return _median(repeats)


def _median(costs: list[Cost]) -> Cost:
    def of(part: Callable[[Cost], float]) -> float:
        return statistics.median(part(cost) for cost in costs)

    return Cost(of(lambda c: c.schedule), of(lambda c: c.pack), of(lambda c: c.update))


def profile(workload: Workload) -> None:
    bench = Bench(workload)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        bench.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(18)


WORKLOADS = (
    Workload(name="decode", num_rows=8),
    Workload(name="decode", num_rows=256),
    Workload(name="decode, 4k context", num_rows=8, num_prompt_tokens=4096),
    Workload(
        name="decode + prompt chunks", num_rows=8, num_waiting_tokens=40_000, token_budget=128
    ),
    Workload(
        name="decode + prompt chunks", num_rows=256, num_waiting_tokens=40_000, token_budget=512
    ),
    Workload(
        name="decode + blocked prompt", num_rows=8, num_blocked_tokens=120_000, token_budget=512
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="also profile the decode workloads")
    options = parser.parse_args()
    print(f"{'rows':>5} {'workload':24} {'schedule':>9} {'pack':>8} {'update':>8} {'total':>8}  µs")
    is_over = False
    for workload in WORKLOADS:
        cost = measure(workload)
        target = TARGETS_US[workload.num_rows] if workload.name == "decode" else None
        is_over |= target is not None and cost.total > target
        verdict = "" if target is None else f"  target {target:.0f}"
        print(
            f"{workload.num_rows:5d} {workload.name:24} {cost.schedule:9.1f} {cost.pack:8.1f} "
            f"{cost.update:8.1f} {cost.total:8.1f}{verdict}"
        )
    if options.profile:
        for workload in WORKLOADS[:2]:
            profile(workload)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
