"""`SeenImages`: the images of one sequence for `ReferenceModel`, in float32. Rows come from
`ReferenceTower`, rotary positions (M-RoPE) from the definition, counted up token by token; nothing
is shared with the engine's. Legend: C tokens of a chunk · S placeholders of all images · E
embed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.reference_tower import ReferenceTower
from cadenza.request import Attachment
from cadenza.vision.processor import ImagePart

NUM_AXES = 3


class SeenImages:
    """Those of a prompt. Its placeholders are taken in order, each once."""

    def __init__(
        self, tower: ReferenceTower, width: int, attachments: Sequence[Attachment]
    ) -> None:
        self._token_id = tower.vision.image_token_id
        self._fill_token_id = tower.vision.fill_token_id
        self._attachments = attachments
        shape = (-1, tower.vision.num_parts, width)
        rows = [tower.embed(_part_of(each), each.payload).reshape(shape) for each in attachments]
        self._rows = np.concatenate(rows) if rows else np.zeros((0, *shape[1:]), np.float32)
        self._num_taken = 0

    def take(
        self, token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
        """Of a chunk's tokens [C]: the ids that stand for them in tables, which of them have rows,
        and the rows [C, parts, E], zeros for text."""
        is_image = token_ids == self._token_id
        found = np.zeros((len(token_ids), *self._rows.shape[1:]), np.float32)
        stop = self._num_taken + int(is_image.sum())
        found[is_image] = self._rows[self._num_taken : stop]
        self._num_taken = stop
        return np.where(is_image, self._fill_token_id, token_ids), is_image, found

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return positions_of(self._attachments, stop)[start:]


def positions_of(attachments: Sequence[Attachment], stop: int) -> npt.NDArray[np.int32]:
    """Time, row and column of the first tokens of a sequence, counted up: [stop, 3]."""
    found: list[tuple[int, ...]] = []
    following = 0
    for each in attachments:
        num_before = each.start - len(found)
        found += [(following + i,) * NUM_AXES for i in range(num_before)]
        following += num_before
        found += [
            (following, following + row, following + column)
            for row in range(each.rows)
            for column in range(each.columns)
        ]
        following += max(each.rows, each.columns)
    found += [(following + i,) * NUM_AXES for i in range(stop - len(found))]
    return np.array(found[:stop], np.int32)


def _part_of(each: Attachment) -> ImagePart:
    return ImagePart(width=each.width, height=each.height, rows=each.rows, columns=each.columns)
