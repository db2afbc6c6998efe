"""How operations become words of a program: recorded within `compute`, alone outside."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec


class ProgramRecorder(OpTable, ABC):
    """Records operations of its library."""

    is_opaque = True

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        self._program: NativeProgram | None = None

    @abstractmethod
    def _new_program(self) -> NativeProgram: ...

    def unwritten(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        program = self._new_program()
        return program.emit(program.unwritten(array_of(shape, dtype)))

    @property
    def _stored_dtype(self) -> Any:
        # XLA copies bfloat16 by way of float32 on a CPU.
        return np.uint16 if self._spec.dtype == jnp.bfloat16 else self._spec.dtype

    def _filled(self, shape: tuple[int, ...], fill: float) -> jax.Array:
        return jnp.full(shape, np.full((), fill, self._spec.dtype).view(self._stored_dtype))

    def compute(self, decode: Callable[[OpTable], Any]) -> Any:
        return self.compute_watched(lambda _: decode(self))

    def compute_watched(self, decode: Callable[[NativeProgram], Any]) -> Any:
        """As `compute`; `decode` is given the program that records what it calls."""
        assert self._program is None, "a program cannot be within another"
        self._program = program = self._new_program()
        try:
            return program.emit(decode(program))
        finally:
            self._program = None

    def _call(self, name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
        """A function that calls an operation, or records it within `compute`. `aliases` maps
        operand indices to the results that reuse their buffers."""
        if self._program is not None:
            return self._program.call(name, results, aliases)
        program = self._new_program()
        record = program.call(name, results, aliases)
        return lambda *operands, **attributes: program.emit(record(*operands, **attributes))


def like(array: Any) -> jax.ShapeDtypeStruct:
    return array_of(array.shape, array.dtype)


def array_of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
