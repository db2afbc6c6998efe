"""`Pool`: folds hidden states of a prompt into an embedding.

Which states are added decides whether it is their mean or a single one.
Invariant: states are added one after another, in the order of their positions and in float64, so
that the bits do not depend on how the prompt was cut.

Legend: N tokens · E embed · D dimensions.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, eq=False, kw_only=True)
class Pool:
    """The sum of the states so far, and then their embedding, of so many `dimensions`; None: all.

    `embedding` is float32, little endian; None before `finish`. Without `normalize` it has the
    length that the mean has.
    """

    dimensions: int | None
    normalize: bool = True
    embedding: bytes | None = field(default=None, init=False)
    _total: npt.NDArray[np.float64] | None = field(default=None, init=False)  # [E]
    _count: int = field(default=0, init=False)

    def add(self, states: npt.NDArray[np.float32]) -> None:
        """Adds hidden states [N, E] of consecutive tokens."""
        for state in states.astype(np.float64):
            # A sum by numpy would be of an order of its own.
            self._total = state.copy() if self._total is None else self._total + state
            self._count += 1

    def finish(self) -> bool:
        """Sets the embedding: the mean, cut to [D] and, if asked for, scaled to unit length; a mean
        of zeros stays as it is. False if it is not finite.
        """
        assert self._total is not None, "nothing was added"
        values = self._total[: self.dimensions] / self._count  # [D]
        if not np.isfinite(values).all():
            return False
        if self.normalize:
            # Exactly rounded, whatever the order.
            length = math.sqrt(math.fsum((values * values).tolist()))
            values = values / (length or 1.0)
        self.embedding = values.astype("<f4").tobytes()
        return True
