"""`SequenceList`: the order of a list, whatever comes and goes."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence, SequenceList
from tests.scheduler.builders import sequence_of


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
