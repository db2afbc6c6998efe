"""`Starts`: why each waiting sequence waits, and whether those behind it are passed."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence, SequenceList, WaitReason
from cadenza.kv.prefix_cache import Prefix
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.starts import ENDS_STARTS
from cadenza.scheduler.step_work import StepWork
from cadenza.tenant import Tenant
from tests.scheduler.builders import add, prompt_of, run_step, scheduler_of, sequence_of


@dataclass(eq=False)
class HoldsBack(StepWork):
    """Side work for which some sequences wait, known before or behind the look-up."""

    early: Mapping[int, WaitReason] = field(default_factory=dict[int, WaitReason])
    late: Mapping[int, WaitReason] = field(default_factory=dict[int, WaitReason])

    def wait_reason(self, sequence: Sequence) -> WaitReason | None:
        return self.early.get(sequence.request_id)

    def wait_reason_behind(self, sequence: Sequence, prefix: Prefix) -> WaitReason | None:
        return self.late.get(sequence.request_id)


def of_tenant(request_id: int, name: str) -> Sequence:
    prompt = prompt_of(4, request_id)
    return Sequence(
        request_id=request_id,
        request=Request(prompt_token_ids=prompt, tenant=Tenant(name=name)),
        seed=request_id,
        max_num_tokens=50,
        stop_token_ids=frozenset(),
        token_ids=list(prompt),
    )


def reasons_of(scheduler: Scheduler) -> dict[int, WaitReason]:
    return {each.request_id: scheduler.why_waits(each) for each in scheduler.waiting}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("reason", [*WaitReason])
def test_what_a_work_says_decides_who_else_starts(reason: WaitReason, *, is_early: bool) -> None:
    held = {1: reason}
    work = HoldsBack(early=held) if is_early else HoldsBack(late=held)
    scheduler = scheduler_of(max_num_seqs=8, works=(work,))
    tenants = ("a", "b", "b", "a")
    add(scheduler, *[of_tenant(number, name) for number, name in enumerate(tenants)])
    run_step(scheduler)
    expected = {1: reason}
    if reason in ENDS_STARTS:
        expected |= {2: WaitReason.TURN, 3: WaitReason.TURN}
    elif reason is WaitReason.QUOTA:
        expected[2] = WaitReason.QUOTA
    assert reasons_of(scheduler) == expected


def test_a_sequence_starts_once_nothing_holds_it_back() -> None:
    held = {0: WaitReason.IMAGE}
    scheduler = scheduler_of(works=(HoldsBack(early=held),))
    add(scheduler, sequence_of(0, 4), sequence_of(1, 4))
    run_step(scheduler)
    assert reasons_of(scheduler) == {0: WaitReason.IMAGE}
    held.clear()
    run_step(scheduler)
    assert not scheduler.waiting
    assert all(each.wait_reason is None for each in scheduler.running)


def test_all_rows_are_taken() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, *[sequence_of(number, 4) for number in range(3)])
    for _ in range(2):
        run_step(scheduler)
        assert reasons_of(scheduler) == {1: WaitReason.ROW, 2: WaitReason.ROW}


def test_too_few_pages_are_free() -> None:
    scheduler = scheduler_of(num_pages=4)
    add(scheduler, *[sequence_of(number, 16, max_tokens=60) for number in range(3)])
    run_step(scheduler)
    run_step(scheduler)
    assert reasons_of(scheduler) == {1: WaitReason.PAGES, 2: WaitReason.TURN}


def test_the_step_has_no_room_for_another_prompt() -> None:
    scheduler = scheduler_of(token_budget=16)
    add(scheduler, *[sequence_of(number, 40) for number in range(3)])
    run_step(scheduler)
    assert reasons_of(scheduler) == {1: WaitReason.STEP, 2: WaitReason.TURN}


def test_another_sample_or_request_computes_the_prompt() -> None:
    scheduler = scheduler_of(token_budget=16)
    params = SamplingParams(n=2)
    samples = [sequence_of(0, prompt_of(33), params=params) for _ in range(2)]
    samples[1].sample = 1
    for each in samples:
        each.siblings = samples
    add(scheduler, *samples, sequence_of(1, (*prompt_of(33), 7)))
    run_step(scheduler)
    assert [scheduler.why_waits(each) for each in scheduler.waiting] == [
        WaitReason.SAMPLE,
        WaitReason.PREFIX,
    ]


def test_those_of_a_failed_step_go_before() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    add(scheduler, sequence_of(0, 4), sequence_of(1, 4))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.fail_batch(batch, "lost")
    scheduler.restart()
    add(scheduler, sequence_of(2, 4))
    run_step(scheduler)
    assert reasons_of(scheduler) == {1: WaitReason.RETRY, 2: WaitReason.RETRY}


@given(st.data())
def test_it_keeps_the_order_of_a_deque(data: st.DataObject) -> None:
    found, expected = SequenceList(), deque[Sequence]()
    for number in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["append", "appendleft", "remove", "requeue"]))
        if action in ("remove", "requeue") and expected:
            sequence = data.draw(st.sampled_from(list(expected)))
            found.remove(sequence)
            expected.remove(sequence)
            assert sequence not in found
            if action == "requeue":
                found.appendleft(sequence)
                expected.appendleft(sequence)
        else:
            sequence = sequence_of(number, 3)
            is_first = action == "appendleft"
            for each in (found, expected):
                each.appendleft(sequence) if is_first else each.append(sequence)
            assert sequence in found
        assert list(found) == list(expected)
        assert len(found) == len(expected)
        assert found[1:] == list(expected)[1:]
    if expected:
        assert found[0] is expected[0]
        assert found[-1] is expected[-1]


def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        SequenceList().remove(sequence_of(0, 3))
