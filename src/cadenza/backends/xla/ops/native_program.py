"""Native operations as one FFI call, since XLA takes one to three microseconds between custom
calls, and a decode step of the 135M shape has 213. `NativeProgram` records them while a function is
traced; results that nothing outside needs share one scratch buffer. `csrc/ffi/program.cpp` reads
what `emit` writes."""

import ctypes
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec

_ALIGNMENT = 64

WORKSPACE_UNIT = 256  # what operations use for themselves begins at a multiple of it

_CODE_OF_DTYPE = {np.dtype(ml_dtypes.bfloat16): 0, np.dtype(np.float32): 1, np.dtype(np.int32): 2}
_ABSENT = 0  # the index of the absent array, which stands for the operand None


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that one array after another occupies: an operand of the program, or a part of the
    scratch buffer from `offset` on. `first` and `last` are the operations that use it."""

    first: int
    last: int
    operand: Any | None = None
    num_bytes: int = 0
    offset: int = 0


@dataclass(slots=True, eq=False)
class Recorded:
    """An array of a program. Only the program's operations can use it before it is emitted."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    storage: Storage
    is_overwritten: bool = False

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class _Operation:
    code: int
    arrays: Sequence[Recorded | None]  # operands, then results
    attributes: Sequence[int]


@dataclass(frozen=True)
class ProgramLibrary(ABC):
    """The kernels of one kind of device, and the FFI target that runs a program of them."""

    handle: ctypes.CDLL

    @property
    @abstractmethod
    def target(self) -> str: ...

    @functools.cached_property
    def digest(self) -> str:
        path = Path(self.handle._name)  # noqa: SLF001 (documented by ctypes)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    @functools.cached_property
    def operations(self) -> Mapping[str, tuple[int, tuple[str, ...]]]:
        """Index and names of the attributes of each operation."""
        self.handle.cadenza_program_operations.restype = ctypes.c_char_p
        text: bytes = self.handle.cadenza_program_operations()
        signatures = [line.split() for line in text.decode().splitlines()]
        return {name: (code, tuple(rest)) for code, (name, *rest) in enumerate(signatures)}


class ProgramWords(NamedTuple):
    """What the target reads of a program: its operations, and the arrays, but the absent one, by
    index."""

    operations: Sequence[int]
    arrays: Sequence[jax.ShapeDtypeStruct]


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded operation: its name, operands and results."""

    name: str
    used: Sequence[Recorded | None]
    made: Sequence[Recorded]


Listener = Callable[[Call], None]  # told of each operation once it is recorded


class NativeProgram:
    """Operations in the order of their calls. `is_portable` takes the kernels without bf16
    instructions, which have the same bits on every CPU."""

    def __init__(self, library: ProgramLibrary, *, is_portable: bool = False) -> None:
        self._library = library
        self._is_portable = is_portable
        self.listener: Listener | None = None
        self._operations: list[_Operation] = []
        self._operands: dict[int, Recorded] = {}

    @property
    def operations(self) -> Collection[str]:
        return self._library.operations

    def call(
        self, name: str, results: Any, aliases: dict[int, int] | None = None
    ) -> Callable[..., Any]:
        """A function that records the operation `name` and returns its results as `Recorded`.
        Operands are arrays, `Recorded`, or None for an absent one. `aliases` maps operand indices
        to the results that reuse their memory, after which nothing may use those operands."""
        code, names = self._library.operations[name]
        shapes = results if isinstance(results, tuple) else (results,)
        operand_of = {result: operand for operand, result in (aliases or {}).items()}

        def record(*operands: Any, **attributes: Any) -> Any:
            assert sorted(attributes) == sorted(names), f"{name} has the attributes {names}"
            used = [self._use(operand) for operand in operands]
            reused = {result: used[index] for result, index in operand_of.items()}
            made = [self._result(shape, reused.get(index)) for index, shape in enumerate(shapes)]
            words = [_word(attributes[each]) for each in names]
            self._operations.append(_Operation(code, (*used, *made), words))
            if self.listener is not None:
                self.listener(Call(name, used, made))
            return tuple(made) if isinstance(results, tuple) else made[0]

        return record

    def unwritten(self, shape: jax.ShapeDtypeStruct) -> Recorded:
        """An array that no operation has to write. As an output its memory is the allocator's:
        pages become resident as they are written, placed as those of weights."""
        return self.call("reserve", shape)()

    def emit(self, outputs: Any) -> Any:
        """Calls the program; returns the tree `outputs` of `Recorded` as arrays."""
        leaves, tree = jax.tree.flatten(outputs)
        assert not any(leaf.is_overwritten for leaf in leaves), "an output was overwritten"
        operands = [each.storage for each in self._operands.values()]
        results = [leaf.storage for leaf in leaves]
        aliases = {
            operands.index(each): at for at, each in enumerate(results) if each.operand is not None
        }
        assert all(
            each.storage in results for each in self._operands.values() if each.is_overwritten
        ), "an operand was overwritten that is not an output"
        outer = {id(each): 1 + at for at, each in enumerate([*operands, *results])}
        first_inner = 1 + len(operands) + len(results) + 1
        inner: dict[int, tuple[int, Recorded]] = {}  # the arrays in the scratch buffer

        def index_of(array: Recorded | None) -> int:
            if array is None:
                return _ABSENT
            own = first_inner + len(inner), array
            return outer.get(id(array.storage)) or inner.setdefault(id(array), own)[0]

        operations: list[int] = []
        for each in self._operations:
            parameters = [*map(index_of, each.arrays), *each.attributes]
            operations += [each.code, len(parameters), *parameters]
        recorded = [array for _, array in inner.values()]
        arrays, scratch_bytes = _lay_out(recorded)
        shapes = [_shape_of(leaf) for leaf in leaves]
        used = [*map(_shape_of, self._operands.values()), *shapes, _bytes(scratch_bytes)]
        words = ProgramWords(operations, [*used, *map(_shape_of, recorded)])
        attributes, workspace_bytes = self._settings(words)
        if workspace_bytes:
            scratch_bytes = -(-scratch_bytes // WORKSPACE_UNIT) * WORKSPACE_UNIT + workspace_bytes
        scratch = _bytes(scratch_bytes)
        call = jax.ffi.ffi_call(
            self._library.target, (*shapes, scratch), input_output_aliases=aliases
        )
        *computed, _ = call(
            *(each.operand for each in operands),
            arrays=np.array(arrays, np.int64),
            operations=np.array(operations, np.int64),
            **attributes,
        )
        return jax.tree.unflatten(tree, computed)

    def _settings(self, words: ProgramWords) -> tuple[dict[str, Any], int]:  # noqa: ARG002
        # The target's further attributes, and the bytes that operations use after the scratch
        # buffer's arrays.
        return {"is_portable": self._is_portable}, 0

    def _use(self, operand: Any) -> Recorded | None:
        """An operand of the next operation; its storage lives at least until then."""
        if operand is None:
            return None
        array = operand if isinstance(operand, Recorded) else self._operand(operand)
        assert not array.is_overwritten, "the operand's memory was overwritten"
        array.storage.last = len(self._operations)
        return array

    def _operand(self, array: Any) -> Recorded:
        known = self._operands.get(id(array))
        if known is None:
            storage = Storage(len(self._operations), len(self._operations), operand=array)
            known = Recorded(array.shape, np.dtype(array.dtype), storage)
            self._operands[id(array)] = known  # `storage` holds the array, so its id stays its own
        return known

    def _result(self, shape: jax.ShapeDtypeStruct, reused: Recorded | None) -> Recorded:
        dtype, position = np.dtype(shape.dtype), len(self._operations)
        if reused is None:
            num_bytes = dtype.itemsize * int(np.prod(shape.shape))
            return Recorded(shape.shape, dtype, Storage(position, position, None, num_bytes))
        reused.is_overwritten = True
        return Recorded(shape.shape, dtype, reused.storage)


def _shape_of(array: Recorded) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _bytes(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.uint8)


def _lay_out(arrays: Sequence[Recorded]) -> tuple[list[int], int]:
    """The arrays of the scratch buffer as words that the library reads, and its size in bytes."""
    num_bytes = set_offsets(list({id(each.storage): each.storage for each in arrays}.values()))
    words: list[int] = []
    for array in arrays:
        code = _CODE_OF_DTYPE[array.dtype]
        words += [array.storage.offset, code, len(array.shape), *array.shape]
    return words, num_bytes


def set_offsets(storages: list[Storage]) -> int:
    """Sets the offsets so that storages in use at the same time do not overlap; returns the end."""
    end = 0
    placed: list[Storage] = []
    for storage in storages:
        placed = [each for each in placed if each.last >= storage.first]
        storage.offset = 0
        for other in sorted(placed, key=lambda each: each.offset):
            if other.offset - storage.offset >= storage.num_bytes:
                break
            # One without bytes may be at the offset of another, and moves nothing back.
            end_of_other = other.offset + -(-other.num_bytes // _ALIGNMENT) * _ALIGNMENT
            storage.offset = max(storage.offset, end_of_other)
        placed.append(storage)
        end = max(end, storage.offset + storage.num_bytes)
    return end


def _word(attribute: Any) -> int:
    """An attribute's bits: a float32 as the 32 bits of a word, others as the number."""
    number = np.asarray(attribute)
    return int(number.view(np.uint32)) if number.dtype == np.float32 else int(number)


class ProgramRecorder(OpTable, ABC):
    """Operations of a library, recorded within `compute`, alone outside."""

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
