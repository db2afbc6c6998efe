"""Rotary positions of tokens in prompts with images."""

import numpy as np
import pytest

from cadenza.batch.packing import rope_positions
from cadenza.request import Attachment


def image(start: int, rows: int, columns: int) -> Attachment:
    return Attachment(start=start, length=rows * columns, digest=b"d", rows=rows, columns=columns)


IMAGES = (image(0, 2, 3), image(9, 3, 1), image(12, 1, 1), image(20, 4, 4))


def by_counting(attachments: tuple[Attachment, ...], stop: int) -> np.ndarray:
    """The definition, token by token."""
    found: list[tuple[int, int, int]] = []
    position = 0
    while len(found) < stop:
        own = next((each for each in attachments if each.start == len(found)), None)
        if own is None:
            found.append((position,) * 3)
            position += 1
            continue
        for row in range(own.rows):
            found += [(position, position + row, position + c) for c in range(own.columns)]
        position += max(own.rows, own.columns)
    return np.array(found[:stop], np.int32).reshape(-1, 3)


def test_an_image_has_positions_by_row_and_column_and_text_goes_on_behind_the_longer_side():
    found = rope_positions((image(2, 2, 3),), 0, 11)
    assert found.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *([2, 2, 2], [2, 2, 3], [2, 2, 4]),
        *([2, 3, 2], [2, 3, 3], [2, 3, 4]),
        [5, 5, 5],
        [6, 6, 6],
        [7, 7, 7],
    ]


@pytest.mark.parametrize("attachments", [(), IMAGES[:1], IMAGES[1:3], IMAGES])
def test_any_part_of_a_prompt_has_the_positions_of_the_whole(attachments: tuple[Attachment, ...]):
    whole = by_counting(attachments, 50)
    for start in range(50):
        for stop in range(start, 50):
            assert np.array_equal(rope_positions(attachments, start, stop), whole[start:stop])


def test_an_attachment_without_a_grid_counts_as_text():
    plain = Attachment(start=3, length=4, digest=b"d")
    assert np.array_equal(rope_positions((plain,), 0, 9), rope_positions((), 0, 9))


def test_positions_never_exceed_indices():
    found = rope_positions(IMAGES, 0, 60)
    assert (found.max(axis=1) <= np.arange(60)).all()
