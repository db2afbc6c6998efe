"""`write_rope_positions`: the rotary positions of tokens in prompts with images (M-RoPE).

A token has three: of time, row and column. Those of text are equal and count up. An image that
follows text at position p - 1 has p for its time, and p + row and p + column in its merged grid;
what follows it begins at p + max(rows, columns). So positions fall behind indices, and never exceed
them. They only rotate queries and keys: which tokens a query sees follows from indices.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cadenza.request import Attachment

NUM_AXES = 3
"""Time, row, column."""


def rope_positions(
    attachments: Sequence[Attachment], start: int, stop: int
) -> npt.NDArray[np.int32]:
    """The positions of the tokens at indices [start, stop) of a sequence: [stop - start, 3].

    Args:
        attachments: all images of the sequence, by their place; each is a run of placeholders.
            Those without a grid count as text.
    """
    found = np.empty((stop - start, NUM_AXES), np.int32)
    shift = 0  # of positions against indices
    done = start
    for each in attachments:
        if each.start >= stop:
            break
        if not each.columns:
            continue
        end = each.start + each.length
        if done < each.start:
            found[done - start : each.start - start] = _text(done, each.start, shift)
            done = each.start
        if done < end:
            last = min(end, stop)
            found[done - start : last - start] = _image(each, done, last, shift)
            done = last
        shift += max(each.rows, each.columns) - each.length
    found[done - start :] = _text(done, stop, shift)
    return found


def _text(start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
    return np.arange(start + shift, stop + shift, dtype=np.int32)[:, None]


def _image(each: Attachment, start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
    places = np.arange(start - each.start, stop - each.start, dtype=np.int32)
    first = each.start + shift
    axes = (np.zeros_like(places), places // each.columns, places % each.columns)
    return first + np.stack(axes, axis=1)
