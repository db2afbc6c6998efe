"""`Admission`: known answers of the reservation, and promises that are never made twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence, SequenceStatus
from cadenza.scheduler.admission import WHOLE_AFTER_PREEMPTIONS, Admission, Reservations
from tests.scheduler.builders import sequence_of


def waiting(num_prompt_tokens: int, max_tokens: int, num_preemptions: int = 0) -> Sequence:
    sequence = sequence_of(0, num_prompt_tokens, max_tokens=max_tokens)
    sequence.num_preemptions = num_preemptions
    return sequence


def running(num_prompt_tokens: int, max_tokens: int, num_pages: int) -> Sequence:
    sequence = waiting(num_prompt_tokens, max_tokens)
    sequence.page_table = list(range(num_pages))
    return sequence


def fewest_pages(candidate: Sequence, others: list[Sequence], reserved_output: float) -> int:
    admission = Admission(page_size=16, reserved_output=reserved_output)
    return next(
        available
        for available in range(1000)
        if Reservations(admission, others).can_admit(candidate, available=available, shared=0)
    )


@pytest.mark.parametrize(("reserved_output", "num_pages"), [(0.0, 1), (0.5, 3), (1.0, 5)])
def test_a_lone_request_wants_its_prompt_and_a_share_of_its_output(
    reserved_output: float, num_pages: int
) -> None:
    # 16 tokens of prompt and 65 of output, whose last one needs no page: 16, 48 or 80 tokens.
    assert fewest_pages(waiting(16, 65), [], reserved_output) == num_pages


@pytest.mark.parametrize(("num_preemptions", "num_pages"), [(0, 3), (1, 4), (2, 5), (3, 5)])
def test_each_preemption_halves_what_is_not_reserved(num_preemptions: int, num_pages: int) -> None:
    assert fewest_pages(waiting(16, 65, num_preemptions), [], 0.5) == num_pages


def test_what_running_ones_were_promised_and_do_not_hold_is_kept_for_them() -> None:
    assert fewest_pages(waiting(16, 1), [running(16, 65, num_pages=1)], 0.5) == 1 + 2
    assert fewest_pages(waiting(16, 1), [running(16, 65, num_pages=3)], 0.5) == 1
    assert fewest_pages(waiting(16, 1), [running(16, 65, num_pages=5)], 0.5) == 1


def test_after_many_preemptions_everybodys_whole_output_is_reserved() -> None:
    others = [running(16, 65, num_pages=1)]
    assert fewest_pages(waiting(16, 17, WHOLE_AFTER_PREEMPTIONS), others, 0.0) == 2 + 4


def test_shared_pages_cost_nothing() -> None:
    admission = Admission(page_size=16, reserved_output=0.0)
    candidate = waiting(64, 1)
    assert not Reservations(admission, []).can_admit(candidate, available=1, shared=0)
    assert Reservations(admission, []).can_admit(candidate, available=1, shared=3)


@given(
    num_prompt_tokens=st.integers(1, 400),
    max_tokens=st.integers(1, 400),
    num_preemptions=st.integers(0, 6),
    reserved_output=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_a_reservation_lies_between_the_prompt_and_the_worst_case(
    num_prompt_tokens: int, max_tokens: int, num_preemptions: int, reserved_output: float
) -> None:
    candidate = waiting(num_prompt_tokens, max_tokens, num_preemptions)
    wanted = fewest_pages(candidate, [], reserved_output)
    assert -(-num_prompt_tokens // 16) <= wanted
    assert wanted <= max(1, -(-(num_prompt_tokens + max_tokens - 1) // 16))


def test_samples_that_are_to_come_are_promised_what_they_do_not_share() -> None:
    samples = [waiting(40, 9) for _ in range(3)]
    for sample in samples:
        sample.siblings = samples
    other = sequence_of(1, 16, max_tokens=1)
    other.page_table = [0]
    # 48 tokens are three pages, two of them shared.
    assert fewest_pages(samples[0], [], 1.0) == 3, "nothing else runs: it may start anyhow"
    assert fewest_pages(samples[0], [other], 1.0) == 3 + 1 + 1
    samples[0].status, samples[0].page_table = SequenceStatus.RUNNING, [1, 2, 3]
    assert fewest_pages(sequence_of(2, 16, max_tokens=1), [samples[0]], 1.0) == 1 + 1 + 1
    assert fewest_pages(samples[1], [samples[0]], 1.0) == 3, "samples wait for no sample"


def test_the_sums_of_a_step_count_what_starts_in_it() -> None:
    admission, others = Admission(page_size=16, reserved_output=0.5), [running(16, 65, num_pages=1)]
    reservations, candidate = Reservations(admission, others), waiting(16, 1)
    assert reservations.can_admit(candidate, available=3, shared=0)
    others.append(running(16, 65, num_pages=2))
    assert not reservations.can_admit(candidate, available=3, shared=0)
    assert reservations.can_admit(candidate, available=4, shared=0)


def test_the_sums_are_made_anew_after_a_step() -> None:
    admission, others = Admission(page_size=16, reserved_output=0.5), [running(16, 65, num_pages=1)]
    reservations, candidate = Reservations(admission, others), waiting(16, 1)
    assert not reservations.can_admit(candidate, available=2, shared=0)
    others[0].page_table.append(1)
    assert not reservations.can_admit(candidate, available=2, shared=0)
    reservations.forget()
    assert reservations.can_admit(candidate, available=2, shared=0)
