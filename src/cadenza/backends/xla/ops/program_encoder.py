"""The operations of image towers as words of a program. Keys of a head lie in blocks of sixteen
rows, and values in pairs of rows, as a decoder's pages (`csrc/kernels/encoder.h`). Legend as in
`ops.table`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.native_program import ProgramRecorder, array_of, like
from cadenza.backends.xla.ops.table import (
    EncoderActivation,
    EncoderBlock,
    EncoderFactors,
    EncoderHeads,
    EncoderShape,
    ImageRows,
)
from cadenza.errors import ConfigError

_CODE_OF_ACTIVATION: dict[EncoderActivation, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "quick_gelu": 3,
}
_LANES = 16  # rows of a block of keys; columns of values are a multiple of it


class ProgramEncoderOps(ProgramRecorder):
    """Of a table of programs."""

    def layer_norm(
        self, x: jax.Array, weight: Any, bias: Any | None, count: jax.Array, eps: float
    ) -> jax.Array:
        return self._call_encoder("layer_norm", array_of(x.shape, self._spec.dtype))(
            x, weight, bias, count, eps=np.float32(eps)
        )

    def activate(self, x: jax.Array, kind: EncoderActivation, count: jax.Array) -> jax.Array:
        return self._call_encoder("activate", array_of(x.shape, self._spec.dtype))(
            x, count, kind=_CODE_OF_ACTIVATION[kind]
        )

    def new_encoder_heads(
        self, num_rows: int, shape: EncoderShape, fill: float | None = None
    ) -> EncoderHeads:
        rows, heads = _rounded_up(num_rows), shape.num_heads
        plain = (heads, rows, shape.head_dim)
        values = (heads, rows, _rounded_up(shape.head_dim))
        if fill is not None:
            return EncoderHeads(*(self._filled(each, fill) for each in (plain, plain, values)))
        dtype = self._stored_dtype
        return EncoderHeads(*(self.unwritten(each, dtype) for each in (plain, plain, values)))

    def keep_heads(
        self,
        qkv: jax.Array,
        heads: EncoderHeads,
        factors: EncoderFactors,
        block: EncoderBlock,
        shape: EncoderShape,
    ) -> EncoderHeads:
        query_norm, key_norm = factors.norms or (None, None)
        results = tuple(like(side) for side in heads)
        kept = self._call_encoder("keep_heads", results, {6: 0, 7: 1, 8: 2})(
            *(qkv, factors.rotations, query_norm, key_norm, block.start, block.num_defined, *heads),
            norm_eps=np.float32(shape.norm_eps),
            norms_values=factors.norms_values,
        )
        return EncoderHeads(*kept)

    def encode_attend(
        self,
        heads: EncoderHeads,
        block: EncoderBlock,
        shape: EncoderShape,
        size: int,
        bounds: jax.Array | None = None,
    ) -> jax.Array:
        result = array_of((size, shape.width), self._spec.dtype)
        return self._call_encoder("encode_attend", result)(
            *heads, *block, bounds, scale=np.float32(shape.scale)
        )

    def keep_rows(self, x: jax.Array, images: ImageRows, part: int, count: jax.Array) -> jax.Array:
        call = self._call_encoder("keep_rows", like(images.rows), {1: 0})
        return call(x, *images, count, part=part)

    def place_rows(
        self, x: jax.Array, images: ImageRows, part: int, count: jax.Array, adds: bool = False
    ) -> jax.Array:
        call = self._call_encoder("place_rows", array_of(x.shape, jnp.float32), {0: 0})
        return call(x, *images, count, part=part, adds=adds)

    def _call_encoder(self, name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
        """Raises ConfigError if the library has no such operation."""
        if name not in self._new_program().operations:
            raise ConfigError(
                f"the {self.name} kernels have no operation {name} of image towers; build them "
                f"anew, or start with --no-images"
            )
        return self._call(name, results, aliases)


def _rounded_up(count: int) -> int:
    return -(-count // _LANES) * _LANES
