"""The shared library of native CPU kernels: loading, packing weights, FFI target (`csrc/ffi/`,
`csrc/README.md`). Read at loading: CADENZA_CPU_ISA, or the best ISA, CADENZA_CPU_INTEGER_ISA for
quantised products, CADENZA_NUM_THREADS. A second library, in source checkouts only, has the kernels
with the faults of `cadenza verify --self-test`, under a prefix of its own."""

import ctypes
import functools
import itertools
import sys
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_program import ProgramLibrary
from cadenza.batch.step_schema import LogitInputs, specs_of
from cadenza.errors import ConfigError
from cadenza.weights.quantised_weight import (
    BlockWeight,
    Float8Weight,
    FloatsOrCodes,
    InputOrder,
)
from cadenza.weights.weight_format import FLOAT8_BLOCK, PANEL, Correction, ScaleType, WeightFormat

LIBRARY_NAME = "_native.dylib" if sys.platform == "darwin" else "_native.so"

_GATED_PANEL = PANEL // 2
_STEPS_OF_SCALES = 2  # the float32 scales of a block take as many bytes as two steps of its codes

_DTYPE_CODES = {np.dtype(ml_dtypes.bfloat16): 0, np.dtype(np.float32): 1, np.dtype(np.float16): 2}
_SCALE_CODES: dict[ScaleType, int] = {"float16": 0, "float32": 1, "nested": 2, "bfloat16": 3}
_CORRECTION_CODES: dict[Correction | None, int] = {None: 0, "zero_point": 1, "offset": 2}
_CODES_HEADER_BYTES = 64
_CACHE_LINE = 64
_INDEX_BYTES = 4
_NO_BLOCKS = -1
_LOGIT_COLUMNS = " ".join(spec.name for spec in specs_of(LogitInputs) for _ in range(spec.columns))

_TARGET = "cadenza_program"
_FAULTY_PREFIX = "faulty_"


@dataclass(frozen=True)
class NativeLibrary(ProgramLibrary):
    """Created by `load_native_library` or `load_faulty_library`."""

    prefix: str = ""

    @property
    def target(self) -> str:
        return self.prefix + _TARGET

    @property
    def cpu_isa(self) -> str:
        return self._text("cpu_isa")

    @property
    def portable_isa(self) -> str:
        """That of the kernels for `--arithmetic portable`: without instructions for bf16."""
        return self._text("portable_isa")

    @property
    def cpu_integer_isa(self) -> str:
        return self._text("cpu_integer_isa")

    @property
    def available_isas(self) -> tuple[str, ...]:
        """The values of CADENZA_CPU_ISA that this machine supports, best first."""
        return tuple(self._text("available_isas").split(","))

    @property
    def available_integer_isas(self) -> tuple[str, ...]:
        return tuple(self._text("available_integer_isas").split(","))

    @property
    def refusal_of_tiles(self) -> str | None:
        """Why the CPU's tile instructions cannot be used; None if they can be, or it has none."""
        return self._text("refusal_of_tiles") or None

    @property
    def tile_rows(self) -> str | None:
        """From how many rows quantised products use tiles, "4 to 16" or "never"; None without
        tiles."""
        return self._text("tile_rows") or None

    @property
    def num_threads(self) -> int:
        return self.handle.cadenza_num_threads()

    def place_pages(self, memory: npt.NDArray[np.uint8]) -> None:
        """Asks for large pages for memory that all threads read for long, spread over memory
        nodes."""
        self.handle.cadenza_place_pages(_address(memory), memory.nbytes)

    def _text(self, name: str) -> str:
        return getattr(self.handle, f"cadenza_{name}")().decode()

    def pack(
        self,
        sources: Sequence[npt.NDArray[Any]],
        packed: npt.NDArray[Any],
        *,
        is_gated: bool = False,
    ) -> None:
        """Packs weights [n, K] of bf16, f16 or f32, contiguous along K, into `packed`, of
        `packed_shape`: rows become consecutive columns; a gated pair is (gate, up). Raises
        ConfigError if types, sizes or alignment do not match."""
        sizes = num_columns(sources, is_gated=is_gated), sources[0].shape[1]
        _check_target(packed, packed_shape(*sizes, packed.dtype, is_gated=is_gated))
        extents = _extents(sources)
        error = self.handle.cadenza_pack(
            len(sources),
            _c_array(ctypes.c_void_p, map(_address, sources)),
            _c_array(ctypes.c_int, (_dtype_code(each.dtype) for each in sources)),
            *extents,
            packed.ctypes.data,
            _dtype_code(packed.dtype),
            is_gated,
        )
        _raise(error)

    def pack_float8(
        self, sources: Sequence[Float8Weight], packed: npt.NDArray[Any], *, is_gated: bool = False
    ) -> None:
        sizes = num_columns(sources, is_gated=is_gated), sources[0].shape[1]
        _check_target(packed, float8_shape(*sizes, is_gated=is_gated))
        codes = [each.codes for each in sources]
        scales = [np.ascontiguousarray(each.scales) for each in sources]
        error = self.handle.cadenza_pack_float8(
            len(sources),
            _c_array(ctypes.c_void_p, map(_address, codes)),
            _c_array(ctypes.c_void_p, map(_address, scales)),
            *_extents(codes),
            packed.ctypes.data,
            is_gated,
        )
        _raise(error)

    def pack_quantised(
        self, operand: "CodedOperand", packed: npt.NDArray[np.uint8], *, is_gated: bool = False
    ) -> None:
        """As `pack`, each part into the codes of its target, `packed_bytes` in all; floats are
        quantised without a copy."""
        targets, sources = operand.targets, operand.parts
        columns = [len(each) for each in (sources[:1] if is_gated else sources)]
        wanted = packed_bytes(
            [*zip(targets[: len(columns)], columns, strict=True)],
            sources[0].shape[1],
            is_gated=is_gated,
            is_ordered=operand.order is not None,
        )
        _check_target(packed, (wanted,))
        if len({each.shape[1] for each in sources}) > 1:
            raise ConfigError(f"weights of {sorted({s.shape[1] for s in sources})} do not fit")
        arrays: list[npt.NDArray[Any]] = []  # referenced until they are packed
        passed = [
            self._source(each, target, arrays)
            for each, target in zip(sources, targets, strict=True)
        ]
        order = None if operand.order is None else np.ascontiguousarray(operand.order, np.int32)
        error = self.handle.cadenza_pack_quantised(
            len(passed),
            _c_array(_CodeSource, passed),
            sources[0].shape[1],
            _address(order),
            packed.ctypes.data,
            packed.nbytes,
            is_gated,
        )
        _raise(error)

    def _source(
        self, source: FloatsOrCodes, target: WeightFormat, arrays: list[npt.NDArray[Any]]
    ) -> "_CodeSource":
        # `arrays` keeps what the result points to.
        passed = _CodeSource(target=self._format_code(target), blocks=_NO_BLOCKS)
        if isinstance(source, np.ndarray):
            rows, passed.dtype = source, _dtype_code(source.dtype)
        elif isinstance(source, BlockWeight):
            rows, passed.format = source.stored, self._format_code(source.format)
            passed.blocks = source.encoding.number
            passed.paired_heads = source.num_paired_heads or 0
        else:
            codes = source.as_codes()
            rows, passed.format = codes.codes, self._format_code(codes.format)
            scales = np.ascontiguousarray(codes.scales)
            passed.scales = scales.ctypes.data
            arrays.append(scales)
            corrections = codes.offsets if codes.zero_points is None else codes.zero_points
            if corrections is not None:
                corrections = np.ascontiguousarray(corrections)
                passed.corrections = corrections.ctypes.data
                arrays.append(corrections)
        _check_strides(rows)
        passed.data, passed.rows = rows.ctypes.data, len(rows)
        passed.row_stride = rows.strides[0] // rows.itemsize
        arrays.append(rows)
        return passed

    def _format_code(self, format: WeightFormat) -> int:
        code = self.handle.cadenza_code_format(
            format.bits,
            format.group,
            _SCALE_CODES[format.scale],
            _CORRECTION_CODES[format.correction],
        )
        if code < 0:
            raise ConfigError(f"there are no kernels for weights in {format.name}")
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedOperand:
    """Weights [Ni, K] side by side, packed as codes of a target each; `order` is that of all parts'
    inputs."""

    targets: Sequence[WeightFormat]
    parts: Sequence[FloatsOrCodes]
    order: InputOrder | None = None


class _CodeSource(ctypes.Structure):
    """As `CadenzaCodeSource` of csrc/ffi/c_api.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("corrections", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("paired_heads", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
    )


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _c_array(element: Any, values: Iterable[Any]) -> Any:
    elements = [*values]
    return (element * len(elements))(*elements)


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ConfigError(error.decode())


def _extents(sources: Sequence[npt.NDArray[Any]]) -> tuple[Any, Any, int]:
    reduction = sources[0].shape[1]
    for each in sources:
        if each.shape[1] != reduction:
            raise ConfigError(f"weights of {reduction} and {each.shape[1]} do not fit together")
        _check_strides(each)
    strides = (each.strides[0] // each.itemsize for each in sources)
    return _c_array(ctypes.c_int64, map(len, sources)), _c_array(ctypes.c_int64, strides), reduction


def _check_target(packed: npt.NDArray[Any], wanted: tuple[int, ...]) -> None:
    if packed.shape != wanted or not packed.flags.c_contiguous:
        raise ConfigError(f"weights that pack to {wanted} do not fit {packed.shape}")


def _check_strides(weight: npt.NDArray[Any]) -> None:
    if weight.strides[1] != weight.itemsize or weight.strides[0] % weight.itemsize != 0:
        raise ConfigError(f"a weight with strides {weight.strides} cannot be packed; copy it")


def num_columns(parts: Sequence[Sized], *, is_gated: bool) -> int:
    """The columns of an operand; those of the gate, which are as many as of up, of a gated one."""
    return len(parts[0]) if is_gated else sum(map(len, parts))


def packed_bytes(
    formats: Sequence[tuple[WeightFormat, int]],
    reduction: int,
    *,
    is_gated: bool = False,
    is_ordered: bool = False,
) -> int:
    """From the format and columns of each part, of one of a gated pair. A part of another format
    begins at a panel."""
    width = _GATED_PANEL if is_gated else PANEL
    total = _CODES_HEADER_BYTES
    if is_ordered:
        total += -(-reduction * _INDEX_BYTES // _CACHE_LINE) * _CACHE_LINE
    for format, group in itertools.groupby(formats, key=lambda each: each[0]):
        panels = -(-sum(columns for _, columns in group) // width)
        total += panels * format.num_bytes((PANEL, reduction))
    return total


def float8_shape(
    num_columns: int, reduction: int, *, is_gated: bool = False
) -> tuple[int, int, int, int]:
    """Shape [panels, steps, 32, 2] of a packed float8_e4m3fn weight, whose scales are steps too."""
    panels, steps, *step = packed_shape(num_columns, reduction, np.float16, is_gated=is_gated)
    return panels, steps + -(-reduction // FLOAT8_BLOCK) * _STEPS_OF_SCALES, step[0], step[1]


def packed_shape(
    num_columns: int, reduction: int, dtype: npt.DTypeLike, *, is_gated: bool = False
) -> tuple[int, int, int, int]:
    """Shape [panels, steps, 32, step] of a packed weight; `num_columns` is F for a gated one."""
    step = 1 if np.dtype(dtype) == np.float32 else 2
    width = _GATED_PANEL if is_gated else PANEL
    return (-(-num_columns // width), -(-reduction // step), PANEL, step)


def library_path() -> Path:
    return Path(__file__).resolve().parents[3] / LIBRARY_NAME


def has_native_library() -> bool:
    return library_path().exists()


def faulty_library_path() -> Path:
    """Where `make -C csrc faults` writes the library with faults for the ISAs in use."""
    folder = Path(__file__).resolve().parents[5] / "csrc" / "build" / "native" / "faults"
    library = load_native_library()
    return folder / f"{library.cpu_isa}-{library.cpu_integer_isa}.so"


@functools.cache
def load_native_library() -> NativeLibrary:
    """Selects the ISA, starts the threads, registers the FFI target. Raises ConfigError if it was
    not built or cannot be loaded, or CADENZA_CPU_ISA or CADENZA_NUM_THREADS is not valid here."""
    path = library_path()
    if not path.exists():
        raise ConfigError(
            f"the native CPU kernels are not built ({path.name} is missing); reinstall with a C++ "
            "compiler and CADENZA_REQUIRE_NATIVE=1 to see why"
        )
    return _load(path, prefix="")


@functools.cache
def load_faulty_library() -> NativeLibrary:
    """No fault is active until one is injected. Raises ConfigError if it was not built or cannot be
    loaded."""
    path = faulty_library_path()
    if not path.exists():
        raise ConfigError("the kernels with faults are not built; run `make -C csrc faults`")
    library = _load(path, prefix=_FAULTY_PREFIX)
    library.handle.cadenza_inject_fault.argtypes = [ctypes.c_int]
    library.handle.cadenza_inject_fault.restype = None
    return library


def _load(path: Path, *, prefix: str) -> NativeLibrary:
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the native CPU kernels cannot be loaded: {error}") from error
    _declare(handle)
    failure = handle.cadenza_configure()
    if failure is not None:
        raise ConfigError(failure.decode())
    columns = handle.cadenza_logit_columns().decode()
    if columns != _LOGIT_COLUMNS:
        raise ConfigError(
            f"the native CPU kernels ({path.name}) are of another version than the package: they "
            f"read {columns}, not {_LOGIT_COLUMNS}; install the package again"
        )
    library = NativeLibrary(handle, prefix)
    capsule = jax.ffi.pycapsule(handle.CadenzaProgram)
    jax.ffi.register_ffi_target(library.target, capsule, platform="cpu")
    return library


_TEXTS = (
    *("configure", "logit_columns"),
    *("cpu_isa", "available_isas", "portable_isa", "cpu_integer_isa", "available_integer_isas"),
    *("refusal_of_tiles", "tile_rows"),
)
_SOURCES, _LONGS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)
_DENSE = (_LONGS, _LONGS, ctypes.c_int64, ctypes.c_void_p)
# The types between the number of sources and `is_gated`.
_PACKERS = {
    "pack": (_SOURCES, ctypes.POINTER(ctypes.c_int), *_DENSE, ctypes.c_int),
    "pack_float8": (_SOURCES, _SOURCES, *_DENSE),
    "pack_quantised": (
        *(ctypes.POINTER(_CodeSource), ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    ),
}


def _declare(handle: ctypes.CDLL) -> None:
    for name in _TEXTS:
        getattr(handle, f"cadenza_{name}").restype = ctypes.c_char_p
    handle.cadenza_num_threads.restype = ctypes.c_int
    handle.cadenza_place_pages.restype = None
    handle.cadenza_place_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    for name, arguments in _PACKERS.items():
        packer = getattr(handle, f"cadenza_{name}")
        packer.restype = ctypes.c_char_p
        packer.argtypes = [ctypes.c_int, *arguments, ctypes.c_int]


def _dtype_code(dtype: npt.DTypeLike) -> int:
    code = _DTYPE_CODES.get(np.dtype(dtype))
    if code is None:
        raise ConfigError(f"weights of type {np.dtype(dtype)} cannot be packed; bf16, f16 or f32")
    return code
