"""`Scheduler`: who computes how much, who waits, who is preempted."""

from dataclasses import replace

import pytest

from cadenza.batch.batch import Batch
from cadenza.batch.sequence import PageCopy, Sequence, SequenceStatus
from cadenza.config import SchedulingPolicy
from cadenza.events import Event, Finished, Token
from cadenza.request import SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.turns import POLICIES
from cadenza.tenant import Tenant
from tests.scheduler.builders import (
    add,
    output_of,
    prompt_of,
    run_step,
    scheduler_of,
    sequence_of,
    shares_of,
)


def scheduled(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.check_invariants()
    return batch


def ids(sequences: object) -> list[int]:
    return [sequence.request_id for sequence in sequences]  # type: ignore[attr-defined]


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def test_one_step_holds_decodes_and_prompt_chunks() -> None:
    scheduler = scheduler_of(token_budget=8)
    add(scheduler, sequence_of(0, 6), sequence_of(1, 2))
    assert run_step(scheduler)[0] == {0: 6, 1: 2}
    add(scheduler, sequence_of(2, 20))
    assert run_step(scheduler)[0] == {0: 1, 1: 1, 2: 6}


def test_a_cut_prompt_stays_in_front_with_the_right_computed_length() -> None:
    scheduler = scheduler_of(token_budget=8)
    long, short = sequence_of(0, 20), sequence_of(1, 3)
    add(scheduler, long, short)
    lengths = []
    for _ in range(3):
        lengths.append((run_step(scheduler)[0], long.num_computed_tokens))
    assert lengths == [({0: 5, 1: 3}, 5), ({0: 7, 1: 1}, 12), ({0: 7, 1: 1}, 19)]


def test_chunks_add_up_to_the_prompt_and_only_the_last_one_samples() -> None:
    scheduler = scheduler_of(token_budget=7)
    add(scheduler, sequence_of(0, 30))
    chunks: list[tuple[int, int, bool]] = []
    while not chunks or not chunks[-1][2]:
        batch = scheduled(scheduler)
        (entry,) = batch.entries
        chunks.append((entry.start, entry.num_new_tokens, bool(entry.num_choices)))
        scheduler.update(batch, output_of(batch))
    assert chunks == [
        (0, 7, False),
        (7, 7, False),
        (14, 7, False),
        (21, 7, False),
        (28, 2, True),
    ]


def test_a_prompt_beside_full_decodes_still_advances() -> None:
    scheduler = scheduler_of(token_budget=4, max_num_seqs=4)
    add(scheduler, *[sequence_of(index, 1) for index in range(3)], sequence_of(3, 10))
    assert run_step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 1}
    for _ in range(8):
        assert run_step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 1}


def test_decodes_advance_beside_an_older_prompt() -> None:
    scheduler = scheduler_of(token_budget=6, max_num_seqs=4)
    add(scheduler, sequence_of(0, 40), *[sequence_of(index, 1) for index in range(1, 4)])
    while len(scheduler.running) < 4:
        run_step(scheduler)
    for _ in range(3):
        assert run_step(scheduler)[0] == {0: 3, 1: 1, 2: 1, 3: 1}


def test_rows_are_bounded_and_the_lowest_free_one_is_reused() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    sequences = [sequence_of(index, 2, max_tokens=2 + 3 * (index == 0)) for index in range(4)]
    add(scheduler, *sequences)
    run_step(scheduler)
    assert [sequence.row for sequence in sequences] == [0, 1, None, None]
    run_step(scheduler)
    assert sequences[1].is_finished
    run_step(scheduler)
    assert [sequence.row for sequence in sequences] == [0, None, 1, None]


def test_nobody_is_let_past_a_sequence_that_waits_for_pages() -> None:
    scheduler = scheduler_of(num_pages=4, token_budget=64, reserved_output=1.0)
    first = sequence_of(0, 20, max_tokens=12)
    large, small = sequence_of(1, 60, max_tokens=4), sequence_of(2, 2, max_tokens=2)
    add(scheduler, first, large, small)
    while not first.is_finished:
        assert run_step(scheduler)[0].keys() == {0}
        assert ids(scheduler.waiting) == [1, 2]
    assert 1 in run_step(scheduler)[0]


def test_the_newest_is_preempted_first_and_waits_in_front_in_order_of_age() -> None:
    scheduler = scheduler_of(num_pages=4, reserved_output=0.0, caching=False)
    add(scheduler, *[sequence_of(index, 15, max_tokens=49) for index in range(3)])
    run_step(scheduler)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert ids(scheduler.running) == [0, 1]
    assert ids(scheduler.waiting) == [2]
    add(scheduler, sequence_of(3, 1))
    while scheduler.num_preemptions < 2:
        run_step(scheduler)
    assert ids(scheduler.running) == [0]
    assert ids(scheduler.waiting) == [1, 2, 3]


def test_the_oldest_always_finishes_even_if_it_needs_the_whole_pool() -> None:
    scheduler = scheduler_of(num_pages=4, reserved_output=0.0, max_num_seqs=3)
    sequences = [sequence_of(index, 10, max_tokens=55) for index in range(3)]
    add(scheduler, *sequences)
    order: list[int] = []
    for _ in range(400):
        events = run_step(scheduler)[1]
        order += [event.request_id for event in events if isinstance(event, Finished)]
    assert order == [0, 1, 2]
    assert sequences[0].num_preemptions == 0
    assert scheduler.num_preemptions > 0


def test_a_preempted_sequence_keeps_its_tokens_and_repeats_no_event() -> None:
    scheduler = scheduler_of(num_pages=2, reserved_output=0.0, caching=False)
    victim = sequence_of(1, 10, max_tokens=10)
    add(scheduler, sequence_of(0, 10, max_tokens=12), victim)
    indices: list[int] = []
    for _ in range(60):
        events = run_step(scheduler)[1]
        indices += [e.index for e in events if isinstance(e, Token) and e.request_id == 1]
    assert victim.num_preemptions == 1
    assert victim.is_finished
    assert indices == list(range(10))


def test_a_sequence_preempted_in_flight_still_takes_the_token_it_had_sampled() -> None:
    scheduler = scheduler_of(num_pages=3, reserved_output=0.0, caching=False)
    oldest, victim = sequence_of(0, 15, max_tokens=30), sequence_of(1, 15, max_tokens=30)
    add(scheduler, oldest, victim)
    in_flight = [scheduled(scheduler)]
    num_tokens = 0
    while not victim.num_preemptions:
        in_flight.append(scheduled(scheduler))
        num_tokens = len(victim.token_ids)
        batch = in_flight.pop(0)
        scheduler.update(batch, output_of(batch))
    assert victim.status is SequenceStatus.WAITING
    assert len(victim.token_ids) == num_tokens + 1
    assert victim.num_pending_tokens == 0
    assert victim.num_computed_tokens == 0


def test_a_preempted_sequence_is_not_readmitted_before_its_token_was_read() -> None:
    scheduler = scheduler_of(num_pages=8)
    sequence = sequence_of(0, 5)
    add(scheduler, sequence)
    batch = scheduled(scheduler)
    scheduler._preempt(sequence)
    assert scheduler.schedule() is None
    scheduler.update(batch, output_of(batch))
    assert shares_of(scheduled(scheduler)) == {0: 6}


def test_pages_are_published_only_after_a_step_that_sampled_finite_logits() -> None:
    scheduler = scheduler_of(token_budget=32)
    add(scheduler, sequence_of(0, prompt_of(40)))
    cache = scheduler.kv_cache.prefix_cache
    assert cache is not None
    first = scheduled(scheduler)
    assert len(cache) == 0
    scheduler.update(first, output_of(first))
    assert len(cache) == 0, "a chunk that samples nothing has not shown that it is finite"
    second = scheduled(scheduler)
    assert len(cache) == 0
    scheduler.update(second, output_of(second))
    assert len(cache) == 2


def test_a_row_that_is_not_finite_fails_alone_and_publishes_nothing() -> None:
    scheduler = scheduler_of(token_budget=64)
    bad, good = sequence_of(0, 20), sequence_of(1, 20)
    add(scheduler, bad, good)
    batch = scheduled(scheduler)
    events = scheduler.update(batch, output_of(batch, bad_rows=(0,)))
    scheduler.check_invariants()
    assert [(event.request_id, type(event)) for event in events] == [(0, Finished), (1, Token)]
    assert isinstance(events[0], Finished)
    assert events[0].finish_reason == "error"
    assert events[0].error
    assert events[0].num_generated_tokens == 0
    assert (
        scheduler.kv_cache.find_prefix(sequence_of(2, bad.request.prompt_token_ids)).num_tokens == 0
    )
    assert (
        scheduler.kv_cache.find_prefix(sequence_of(3, good.request.prompt_token_ids)).num_tokens
        == 16
    )


def test_pages_in_flight_are_not_handed_out_when_their_sequence_is_cancelled() -> None:
    scheduler = scheduler_of(num_pages=2, token_budget=64, caching=False)
    first, second = sequence_of(0, 20, max_tokens=5), sequence_of(1, 20, max_tokens=5)
    add(scheduler, first, second)
    batch = scheduled(scheduler)
    table = set(first.page_table)
    scheduler.end(first)
    assert scheduler.kv_cache.pool.num_available == 0
    assert scheduler.schedule() is None, "its pages are still written"
    assert scheduler.update(batch, output_of(batch)) == []
    scheduler.check_invariants()
    assert set(second.page_table) == set()
    scheduled(scheduler)
    assert set(second.page_table) == table


def test_entries_of_a_sequence_that_has_ended_are_dropped() -> None:
    scheduler = scheduler_of()
    sequence = sequence_of(0, 4, stop_token_ids=frozenset({9}))
    add(scheduler, sequence)
    first = scheduled(scheduler)
    overrun = scheduled(scheduler)
    assert kinds(scheduler.update(first, output_of(first, token_id=9))) == [Finished]
    assert scheduler.update(overrun, output_of(overrun)) == []
    assert len(sequence.token_ids) == 5
    counts = scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)


def test_nothing_is_launched_past_the_length_cap() -> None:
    scheduler = scheduler_of()
    add(scheduler, sequence_of(0, 4, max_tokens=1))
    scheduled(scheduler)
    assert scheduler.schedule() is None


def test_a_stop_token_wins_over_the_length_cap_on_the_same_token() -> None:
    scheduler = scheduler_of()
    params = SamplingParams(stop_token_ids=(9,))
    sequence = sequence_of(0, 4, max_tokens=1, params=params, stop_token_ids=frozenset({9}))
    add(scheduler, sequence)
    batch = scheduled(scheduler)
    (end,) = scheduler.update(batch, output_of(batch, token_id=9))
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stop_token_id, end.num_generated_tokens) == ("stop", 9, 1)


def test_the_last_allowed_token_is_sent_and_finishes_as_length() -> None:
    scheduler = scheduler_of()
    add(scheduler, sequence_of(0, 4, max_tokens=1))
    batch = scheduled(scheduler)
    token, end = scheduler.update(batch, output_of(batch, token_id=8))
    assert isinstance(token, Token)
    assert (token.token_id, token.index) == (8, 0)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stop_token_id) == ("length", None)


def test_the_sequences_of_a_failed_batch_are_retried_one_by_one_and_then_ended() -> None:
    scheduler = scheduler_of(token_budget=8)
    add(scheduler, sequence_of(0, 4), sequence_of(1, 4), sequence_of(2, 4))
    ended: list[tuple[int, str | None]] = []
    batches: list[list[int]] = []
    for _ in range(3):
        batch = scheduled(scheduler)
        batches.append([entry.sequence.request_id for entry in batch.entries])
        for event in scheduler.fail_batch(batch, "lost"):
            assert isinstance(event, Finished)
            ended.append((event.request_id, event.error))
        scheduler.restart()
        scheduler.check_invariants()
    assert batches == [[0, 1], [0], [1]]
    assert ended == [(0, "lost"), (1, "lost")]
    assert ids(scheduler.waiting) == [2]
    assert scheduler.kv_cache.pool.counts().live == 0


def failed_together(scheduler: Scheduler, *sequences: Sequence) -> None:
    """One step of all these is lost."""
    add(scheduler, *sequences)
    batch = scheduled(scheduler)
    assert shares_of(batch).keys() == {each.request_id for each in sequences}
    assert not scheduler.fail_batch(batch, "lost")
    scheduler.restart()


def give(sequence: Sequence, tenant: str) -> Sequence:
    sequence.request = replace(sequence.request, tenant=Tenant(name=tenant))
    return sequence


def run_to_the_end(scheduler: Scheduler) -> list[dict[int, int]]:
    """The shares of steps, each of which computes something, until nothing is left."""
    shares: list[dict[int, int]] = []
    while scheduler.has_work:
        shares.append(run_step(scheduler)[0])
        assert shares[-1], "nothing is computed, although sequences wait"
    return shares


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("names", [("a", "a", "a"), ("a", "b", "a")])
def test_one_that_is_retried_waits_for_pages_but_not_for_who_was_preempted_before_it(
    name: SchedulingPolicy, names: tuple[str, ...]
) -> None:
    """Two have been retried, the third lacks pages for it. One of the two is preempted for the
    other one's pages and stands before the third then."""
    scheduler = scheduler_of(
        num_pages=4, reserved_output=0.0, token_budget=64, policy=POLICIES[name](10.0)
    )
    lengths = (15, 15, 30)
    sequences = [sequence_of(at, length, max_tokens=24) for at, length in enumerate(lengths)]
    for sequence, tenant in zip(sequences, names, strict=True):
        give(sequence, tenant)
    failed_together(scheduler, *sequences)
    assert run_step(scheduler)[0] == {0: 15}
    assert run_step(scheduler)[0] == {1: 15}
    while scheduler.num_preemptions == 0:
        assert run_step(scheduler)[0].keys() <= {0, 1}
        assert sequences[2].is_retried
    preempted, retried = ids(scheduler.waiting)
    assert retried == 2
    shares = run_to_the_end(scheduler)
    first = next(at for at, each in enumerate(shares) if 2 in each)
    assert shares[first] == {2: 30}, "it is retried alone"
    assert all(preempted not in each for each in shares[:first]), "another one starts before it"


@pytest.mark.parametrize("name", POLICIES)
def test_those_that_come_leave_one_that_is_retried_the_pages_that_it_waits_for(
    name: SchedulingPolicy,
) -> None:
    scheduler = scheduler_of(
        num_pages=4, reserved_output=0.0, token_budget=64, policy=POLICIES[name](10.0)
    )
    first, second = sequence_of(0, 16, max_tokens=24), sequence_of(1, 40, max_tokens=8)
    failed_together(scheduler, first, second)
    order: list[int] = []
    for at in range(2, 42):
        add(scheduler, give(sequence_of(at, 4, max_tokens=8), "another"))
        order += [each for each in run_step(scheduler)[0] if each not in order]
    assert order[:2] == [0, 1]


def test_a_restart_recomputes_the_running_in_order_and_forgets_the_cache() -> None:
    scheduler = scheduler_of(token_budget=64)
    sequences = [sequence_of(index, 20) for index in range(3)]
    add(scheduler, *sequences)
    run_step(scheduler)
    batch = scheduled(scheduler)
    scheduler.unpin(batch)
    scheduler.restart()
    scheduler.check_invariants()
    assert ids(scheduler.waiting) == [0, 1, 2]
    assert scheduler.kv_cache.prefix_cache is not None
    assert len(scheduler.kv_cache.prefix_cache) == 0
    assert run_step(scheduler)[0] == {0: 21, 1: 21, 2: 21}
    assert [len(sequence.token_ids) for sequence in sequences] == [22, 22, 22]


def test_cancelling_a_waiting_sequence_takes_it_out_of_the_queue() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    running, waiting = sequence_of(0, 4), sequence_of(1, 4)
    add(scheduler, running, waiting)
    run_step(scheduler)
    scheduler.end(waiting)
    scheduler.end(running)
    scheduler.check_invariants()
    assert not scheduler.has_work
    assert running.is_finished
    assert waiting.is_finished


def test_only_what_the_first_admission_found_counts_as_cached() -> None:
    scheduler = scheduler_of(token_budget=64)
    first = sequence_of(0, prompt_of(40))
    add(scheduler, first)
    run_step(scheduler)
    scheduler._preempt(first)
    second = sequence_of(1, prompt_of(40))
    add(scheduler, second)
    run_step(scheduler)
    run_step(scheduler)
    assert first.num_cached_tokens == 0, "what it finds of its own is no saving"
    assert second.num_cached_tokens == 32


@pytest.mark.parametrize("fault", ["row", "page", "status"])
def test_the_invariants_catch_a_wrong_row_page_or_status(fault: str) -> None:
    scheduler = scheduler_of()
    sequence = sequence_of(0, 4)
    add(scheduler, sequence)
    run_step(scheduler)
    if fault == "row":
        sequence.row = 3
    elif fault == "page":
        sequence.page_table.clear()
    else:
        sequence.status = SequenceStatus.WAITING
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_a_fork_copies_the_tokens_that_its_prompt_has_in_the_last_page() -> None:
    scheduler = scheduler_of(token_budget=64)
    samples = [sequence_of(0, 37) for _ in range(2)]
    for sample in samples:
        sample.siblings = samples
    add(scheduler, *samples)
    run_step(scheduler)
    source, fork = samples
    (copy,) = scheduled(scheduler).page_copies
    assert copy == PageCopy(source.page_table[2], fork.page_table[2], num_tokens=36 - 32)


def test_no_step_is_left_out_while_a_page_is_to_be_copied() -> None:
    """Its source may be another one's before the next step."""
    scheduler = scheduler_of()
    waits = sequence_of(0, 3, max_tokens=1)
    add(scheduler, waits)
    scheduled(scheduler)
    assert scheduler.schedule() is None, "its last token is being computed"
    waits.page_copy = PageCopy(1, waits.page_table[0], num_tokens=2)
    with pytest.raises(AssertionError, match="no step makes a page's copy"):
        scheduler.schedule()
