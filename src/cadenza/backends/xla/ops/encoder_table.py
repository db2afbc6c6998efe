"""The operations of an op table that image towers use beside those of decoders, on blocks of an
image's rows. A row's results do not depend on where blocks begin, or on memory after the last row.
Legend: B rows of a block · N rows of the workspace · E width · F MLP · H heads · D head size · R
values of a head that are rotated · S image slots · T padded tokens."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

# x Phi(x) by erf, its approximation by tanh, x sigmoid(1.702 x), and x sigmoid(x).
EncoderActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

# Keys of a softmax span; spans begin at multiples of it, from the image's first row.
ENCODER_SPAN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The heads of a tower's attention: as many keys and values as queries."""

    num_heads: int
    head_dim: int
    scale: float  # of the scores
    norm_eps: float = 1e-6  # of the norms of heads

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class EncoderBlock(NamedTuple):
    """Rows of an image that are computed together; int32 [] each."""

    start: jax.Array  # the first one's index in the image
    num_defined: jax.Array  # at most B
    num_rows: jax.Array  # of the whole image, at most N


class EncoderFactors(NamedTuple):
    """Value i of a head is rotated with value i + R / 2, as a decoder's: towers whose pairs lie
    elsewhere have their weights' rows, and norms, reordered at loading."""

    rotations: Any | None = None  # [B, R] float32: cosines, then sines
    norms: tuple[Any, Any] | None = None  # [D] each: RMS norms of a head's query and key
    norms_values: bool = False  # by an RMS norm without weight


class EncoderHeads(NamedTuple):
    """Queries, keys and values of an image's rows in one layer; the table chooses the layout."""

    queries: Any
    keys: Any
    values: Any


class ImageRows(NamedTuple):
    """Embeddings of images, and which of them each token has."""

    rows: jax.Array  # [S, parts E], activations
    slots: jax.Array  # [T], int32: negative for a token of text
