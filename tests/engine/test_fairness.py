"""Preemption where pages are scarce: all finish, little is computed twice, and none starves.

Owns the definition of the fair wait. All requests of a run are sent at once, in one order.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from cadenza.batch.batch import Batch
from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits, SchedulerLoop, SchedulingPolicy
from cadenza.events import Event
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.turns import POLICIES
from tests.by_day import by_day
from tests.engine.simulation import (
    IN_ORDER,
    REAL_PARTS,
    VOCAB_SIZE,
    ObservedRunner,
    Order,
    Parts,
    Record,
    make_engine,
    replayable,
    run_requests,
)

PAGE_SIZE = 16
MAX_NUM_SEQS = 16
TOKEN_BUDGET = 32
MAX_MODEL_LEN = 192
WORST_CASE = MAX_MODEL_LEN // PAGE_SIZE
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MAX_PREEMPTIONS = 8
HERE = "tests/engine/test_fairness.py"


def limits_of(num_pages: int) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_queued_reqs=1000,
        enable_prefix_caching=False,
    )


def requests_of(seed: int, count: int = 24) -> list[Request]:
    """Mixed prompts and outputs, no two of one prefix; a few fill the whole context."""
    rng = random.Random(f"fairness {seed}")
    requests: list[Request] = []
    for _ in range(count):
        num_prompt_tokens = rng.choice([rng.randint(1, 32), rng.randint(1, MAX_MODEL_LEN - 1)])
        most = MAX_MODEL_LEN - num_prompt_tokens
        params = SamplingParams(
            max_tokens=rng.choice([most, rng.randint(1, most)]),
            temperature=0.0,
            ignore_eos=True,
        )
        prompt = tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt_tokens))
        requests.append(Request(prompt_token_ids=prompt, params=params))
    return requests


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one run cost whom."""

    record: Record
    first_token_at: dict[int, int] = field(default_factory=dict)
    num_preemptions: dict[int, int] = field(default_factory=dict)
    num_useful_tokens: int = 0
    num_launched_tokens: int = 0


def measure(
    requests: list[Request],
    num_pages: int,
    *,
    loop: SchedulerLoop = "overlap",
    parts: Parts = REAL_PARTS,
    order: Order = IN_ORDER,
) -> Measured:
    engine = make_engine(limits_of(num_pages), loop=loop, parts=parts, order=order)
    num_preemptions: dict[int, int] = {}

    def watch(_: Record) -> None:
        for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
            num_preemptions[sequence.request_id] = sequence.num_preemptions

    record = run_requests(engine, requests, before_step=watch)
    record.verify()
    assert isinstance(engine.runner, ObservedRunner)
    measured = Measured(
        record=record,
        num_preemptions=num_preemptions,
        num_useful_tokens=sum(map(num_computed, requests)),
        num_launched_tokens=engine.runner.num_launched_tokens,
    )
    for at, event in record.log:
        _note_first_token(measured, at, event)
    return measured


def _note_first_token(measured: Measured, at: int, event: Event) -> None:
    measured.first_token_at.setdefault(event.request_id, at + 1)


def num_computed(request: Request) -> int:
    """Tokens whose KV a request needs: all but the last of its stream."""
    max_tokens = request.params.max_tokens
    assert max_tokens is not None
    return len(request.prompt_token_ids) + max_tokens - 1


def fair_waits(requests: list[Request], num_pages: int) -> list[float]:
    """Steps until each request's first token, were every resource shared out perfectly.

    A request that runs alone takes its prompt's chunks and a step for each further token. While it
    runs it uses up a row, its tokens' share of the budget, and pages: on average half of those of
    its output and all of those of its prompt. The fair wait of a request is the time in which the
    scarcest of rows, budget and pages can have done all that came before it, plus the chunks of
    its own prompt, plus one step because tokens are read one step late.
    """
    waits: list[float] = []
    row_steps = token_steps = page_steps = 0.0
    for request in requests:
        prompt, tokens = len(request.prompt_token_ids), num_computed(request)
        chunks = -(-prompt // TOKEN_BUDGET)
        waits.append(max(row_steps, token_steps, page_steps) + chunks + 1)
        steps = chunks + tokens - prompt
        row_steps += steps / MAX_NUM_SEQS
        token_steps += tokens / TOKEN_BUDGET
        page_steps += steps * (prompt + tokens) / 2 / PAGE_SIZE / num_pages
    return waits


def check_scarcity(
    seed: int, factor: float, *, loop: SchedulerLoop = "overlap", parts: Parts = REAL_PARTS
) -> None:
    requests = requests_of(seed)
    num_pages = int(WORST_CASE * factor)
    measured = measure(requests, num_pages, loop=loop, parts=parts)
    most = max(measured.num_preemptions.values())
    assert most <= MAX_PREEMPTIONS, f"a request was preempted {most} times"
    for request_id, fair_wait in enumerate(fair_waits(requests, num_pages)):
        wait = measured.first_token_at[request_id]
        assert wait <= 4 * fair_wait, f"request {request_id} waited {wait}, fair is {fair_wait}"


@pytest.mark.parametrize("loop", by_day(["plain", "overlap"], ["overlap"]))
@pytest.mark.parametrize("factor", by_day(FACTORS, FACTORS[::2]))
@pytest.mark.parametrize("seed", by_day(range(100), range(2)))
def test_all_finish_and_wait_no_longer_than_fair_in_pools_of_any_size(
    seed: int, factor: float, loop: SchedulerLoop
) -> None:
    name = "test_all_finish_and_wait_no_longer_than_fair_in_pools_of_any_size"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}-{factor}-{loop}]'"):
        check_scarcity(seed, factor, loop=loop)


@pytest.mark.parametrize("name", ["shortest_first", "priority"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_all_finish_in_small_pools_with_every_policy(name: SchedulingPolicy, factor: float) -> None:
    requests = requests_of(0)
    if name == "priority":
        requests = [replace(each, priority=at % 3) for at, each in enumerate(requests)]
    order = Order(policy=POLICIES[name](0.05))
    measured = measure(requests, int(WORST_CASE * factor), order=order)
    assert max(measured.num_preemptions.values()) <= MAX_PREEMPTIONS


def check_oversubscription(seed: int, *, parts: Parts = REAL_PARTS) -> None:
    """Sixteen rows that would fill four times the pool."""
    rng = random.Random(f"oversubscribed {seed}")
    requests = [
        Request(
            prompt_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(8, 24))),
            params=SamplingParams(temperature=0.0, max_tokens=168, ignore_eos=True),
        )
        for _ in range(MAX_NUM_SEQS + 4)
    ]
    num_pages = MAX_NUM_SEQS * WORST_CASE // 4
    measured = measure(requests, num_pages, parts=parts)
    assert sum(measured.num_preemptions.values()) > 0, "pages were not scarce"
    num_recomputed = measured.num_launched_tokens - measured.num_useful_tokens
    assert 0 <= num_recomputed <= measured.num_useful_tokens, "more was recomputed than useful"


@pytest.mark.parametrize("seed", by_day(range(3), {0}))
def test_at_fourfold_oversubscription_less_is_recomputed_than_is_useful(seed: int) -> None:
    name = "test_at_fourfold_oversubscription_less_is_recomputed_than_is_useful"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}]'"):
        check_oversubscription(seed)


def test_with_pages_for_all_nothing_is_computed_twice() -> None:
    requests = requests_of(0)
    measured = measure(requests, MAX_NUM_SEQS * WORST_CASE, loop="plain")
    assert measured.num_launched_tokens == measured.num_useful_tokens
    assert max(measured.num_preemptions.values()) == 0


class ServesTheLastFirst(Scheduler):
    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.waiting.remove(sequence)
        self.waiting.appendleft(sequence)


class PreemptsForNothing(Scheduler):
    """Gives up the newest running sequence every other step."""

    def schedule(self, now_s: float = 0.0) -> Batch | None:
        if self.num_steps % 2 and len(self.running) > 1:
            self._preempt(self.running[-1])
        return super().schedule(now_s)


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [(ServesTheLastFirst, "waited"), (PreemptsForNothing, "was preempted")],
)
def test_the_bound_of_waits_and_preemptions_catches_the_fault(
    mutant: type[Scheduler], fault: str
) -> None:
    def check_all_pools() -> None:
        for seed in range(2):
            for factor in FACTORS:
                check_scarcity(seed, factor, parts=Parts(scheduler=mutant))

    with pytest.raises(AssertionError, match=fault):
        check_all_pools()


def test_the_bound_of_recomputation_catches_needless_preemption() -> None:
    with pytest.raises(AssertionError, match="more was recomputed than useful"):
        check_oversubscription(0, parts=Parts(scheduler=PreemptsForNothing))
