"""Spans that are computed whole: no step ends within one, and everybody goes on."""

import random

import pytest

from cadenza.batch.prompt import Prompt
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import NO_REACH
from cadenza.batch.whole_spans import (
    WholeSpan,
    cut_within,
    fitting_count,
    least_budget,
    whole_spans_of,
)
from cadenza.request import Attachment, SamplingParams
from cadenza.scheduler.step_budget import PromptBudget, PromptPart, PromptShares
from tests.scheduler.builders import add, output_of, packer_of, scheduler_of, sequence_of

SPANS = (WholeSpan(4, 10), WholeSpan(10, 13), WholeSpan(20, 26))


def seeing(request_id: int, length: int, *spans: WholeSpan, max_tokens: int = 3) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    sequence = sequence_of(request_id, length, max_tokens=max_tokens, params=params)
    sequence.prompt = Prompt(spans=spans)
    return sequence


def test_the_spans_of_a_prompt_are_its_attachments() -> None:
    attachments = [
        Attachment(start=3, length=4, digest=b"a"),
        Attachment(start=9, length=2, digest=b"b"),
    ]
    assert whole_spans_of(attachments) == (WholeSpan(3, 7), WholeSpan(9, 11))


def test_tokens_end_within_a_span_but_not_at_its_ends() -> None:
    cut = [stop for stop in range(30) if cut_within(SPANS, stop) is not None]
    assert cut == [5, 6, 7, 8, 9, 11, 12, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    ("start", "count", "most", "expected"),
    [
        (0, 3, 99, 3),
        (0, 4, 99, 4),
        (0, 5, 99, 4),  # up to the span
        (4, 1, 6, 6),  # the whole of it
        (4, 1, 5, 0),  # it does not fit
        (7, 1, 3, 3),  # what is left of it
        (4, 7, 9, 6),  # not the next one's beginning
        (10, 30, 99, 30),
        (26, 2, 0, 2),
    ],
)
def test_a_count_is_cut_before_a_span_or_completes_it(
    start: int, count: int, most: int, expected: int
) -> None:
    assert fitting_count(SPANS, start, count, most) == expected


def test_a_span_is_taken_whole_beyond_its_share() -> None:
    parts = [
        PromptPart(start=0, num_left=40, spans=(WholeSpan(0, 12),)),
        PromptPart(start=0, num_left=5),
    ]
    shares = PromptShares(PromptBudget(num_tokens=16), parts)
    assert shares.counts == [14, 2]
    assert PromptShares(PromptBudget(num_tokens=11), parts).counts == [0, 5]


@pytest.mark.parametrize("budget", [9, 12, 16, 40])
def test_every_schedule_computes_spans_whole_and_ends(budget: int) -> None:
    rng = random.Random(f"spans {budget}")
    scheduler = scheduler_of(token_budget=budget, num_pages=9)
    for request_id in range(12):
        spans: list[WholeSpan] = []
        while not spans or (rng.random() < 0.7 and spans[-1].stop < 60):
            start = (spans[-1].stop if spans else 0) + rng.randrange(9)
            spans.append(WholeSpan(start, start + rng.randint(1, 6)))
        length = spans[-1].stop + rng.randrange(8)
        add(scheduler, seeing(request_id, length, *spans))
    assert least_budget(6, scheduler.limits.max_num_seqs) <= budget
    num_steps = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        for entry in batch.entries:
            assert cut_within(entry.sequence.prompt.spans, entry.end) is None
        scheduler.update(batch, output_of(batch))
        scheduler.check_invariants()
        num_steps += 1
        assert num_steps < 2000


def test_a_stream_of_short_prompts_does_not_keep_a_span_waiting() -> None:
    scheduler = scheduler_of(token_budget=16)
    long = seeing(0, 14, WholeSpan(0, 13))
    add(scheduler, long)
    for step in range(3):
        add(scheduler, *[sequence_of(10 * step + n, 8, max_tokens=1) for n in (1, 2, 3)])
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, output_of(batch))
        if long.num_computed_tokens:
            break
    assert long.num_computed_tokens >= 13


def test_the_packer_writes_how_far_tokens_of_a_span_see() -> None:
    scheduler = scheduler_of(token_budget=16)
    add(scheduler, seeing(0, 8, WholeSpan(1, 4), WholeSpan(4, 6)), sequence_of(1, 4))
    batch = scheduler.schedule()
    assert batch is not None
    reaches = packer_of().pack(batch, 16).tokens.reaches.tolist()
    no = NO_REACH
    assert reaches == [no, 3, 3, 3, 5, 5, no, no, *[no] * 8]


def test_the_packer_writes_the_end_of_a_span_whose_beginning_is_computed() -> None:
    scheduler = scheduler_of(token_budget=16)
    sequence = seeing(0, 20, WholeSpan(2, 18))
    add(scheduler, sequence)
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(first, output_of(first))
    sequence.num_computed_tokens = 16  # as a hit in the prefix cache leaves it
    batch = scheduler.schedule()
    assert batch is not None
    assert packer_of().pack(batch, 8).tokens.reaches.tolist()[:5] == [
        17,
        17,
        NO_REACH,
        *[NO_REACH] * 2,
    ]
