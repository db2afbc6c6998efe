"""`Manifest`: what a folder of compiled modules contains, written by `cadenza export`. Invariant:
it is that of the model whose config.json lies beside it, and a module that `read_module` gives has
the manifest's digest."""

import hashlib
import platform
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import msgspec

from cadenza.backends.base import CompiledSizes
from cadenza.errors import CheckpointError
from cadenza.weights.dtypes import WeightDType, item_bytes

FOLDER = "iree"  # in a model's folder

MANIFEST_FILE = "manifest.json"
MADE_FILE = "parameters.safetensors"  # parameters that are no tensors of the checkpoint

SCOPE = "model"  # of the parameters' names

FORMAT = 1

MAX_MANIFEST_BYTES = 16 << 20
MAX_MODULE_BYTES = 256 << 20

_CPU_FILE = Path("/proc/cpuinfo")
# How the names of features begin that compilers use.
_FEATURES = ("adx", "aes", "amx", "asimd", "avx", "bmi", "f16c", "fma", "gfni", "ss", "sve")


class Array(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape and type of an argument."""

    shape: tuple[int, ...]
    dtype: str


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter: tensors of the checkpoint, one after the other, or the factors of a rope; if
    there are neither, it has its name in `MADE_FILE`."""

    name: str
    array: Array
    tensors: tuple[str, ...] = ()
    rope: int | None = None


class WireField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The words [start, stop) of a field of `core.step_schema`, as `group.name`."""

    name: str
    start: int
    stop: int


class CompiledProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module with one function, its name."""

    name: str
    file: str
    sha256: str
    num_tokens: int = 0  # with `num_logits`: of a step, padded; 0 of other programs
    num_logits: int = 0
    fields: tuple[WireField, ...] = ()  # of a step's words


class ModuleBucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The programs for `num_rows` rows, and the state that they share: the pools, the last sampled
    tokens, the token history."""

    num_rows: int
    state: tuple[Array, ...]
    programs: tuple[CompiledProgram, ...]

    def program(self, name: str) -> CompiledProgram:
        return next(each for each in self.programs if each.name == name)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compiled modules."""

    format: int
    config: str  # the SHA-256 of the model's config.json
    compiler: str  # its version; a runtime has the same
    target: str  # the compiler's backend: `llvm-cpu` or `vulkan-spirv`
    flags: tuple[str, ...]
    architecture: str = ""  # with `features`: of the CPU, for `llvm-cpu`; see `Cpu`
    features: tuple[str, ...] = ()
    dtype: WeightDType
    vocab_size: int
    max_model_len: int  # of a sequence; each row has a slot for so many tokens
    num_rule_words: int  # of a rule record
    num_columns: int  # of a step's result
    parameters: tuple[Parameter, ...]
    buckets: tuple[ModuleBucket, ...]

    def bucket(self, num_rows: int) -> ModuleBucket | None:
        fitting = [each for each in self.buckets if each.num_rows >= num_rows]
        return min(fitting, key=lambda each: each.num_rows, default=None)

    @property
    def most(self) -> CompiledSizes:
        largest = max(self.buckets, key=lambda each: each.num_rows)
        return CompiledSizes(
            num_rows=largest.num_rows,
            max_model_len=self.max_model_len,
            num_tokens=largest.program("prompt").num_tokens,
        )

    @property
    def weight_bytes(self) -> int:
        return sum(
            prod(each.array.shape) * item_bytes(cast(WeightDType, each.array.dtype))
            for each in self.parameters
        )

    @property
    def described(self) -> tuple[str, ...]:
        """What decides the bits of the modules' results."""
        digests = (each.sha256 for bucket in self.buckets for each in bucket.programs)
        return (self.compiler, self.target, *self.features, *self.flags, *digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU's architecture, and the features that a compiler can use, as Linux names them."""

    architecture: str
    flags: frozenset[str]

    @classmethod
    def of_this_machine(cls) -> "Cpu":
        try:
            text = _CPU_FILE.read_text(encoding="ascii", errors="replace")
        except OSError:
            text = ""
        lines = (line.partition(":") for line in text.splitlines())
        found = (value for name, _, value in lines if name.strip() in ("flags", "Features"))
        flags = frozenset(next(found, "").split())
        return cls(
            architecture=platform.machine(),
            flags=frozenset(each for each in flags if each.startswith(_FEATURES)),
        )


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a model's folder. Raises CheckpointError if there is none, or it is of
    another model or version."""
    path = folder / FOLDER / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(
            f"the model has no compiled modules ({FOLDER}/{MANIFEST_FILE}); `cadenza export MODEL "
            f"OUT` writes a folder that has, or choose another --backend"
        )
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_MANIFEST_BYTES), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}; export it again") from error
    if found.format != FORMAT:
        raise CheckpointError(
            f"{path.name} has the format {found.format}, and {FORMAT} is read; export it again"
        )
    if found.config != sha256_of((folder / "config.json").read_bytes()):
        raise CheckpointError(
            f"the compiled modules are of another config.json than {str(folder)!r} has; export "
            f"the model again"
        )
    return found


def read_module(folder: Path, program: CompiledProgram) -> bytes:
    path = folder / FOLDER / program.file
    if path.parent != folder / FOLDER:
        raise CheckpointError(f"{MANIFEST_FILE} names {program.file!r}, outside its folder")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MODULE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{program.file} cannot be read: {error.strerror}") from error
    if sha256_of(content) != program.sha256:
        raise CheckpointError(
            f"{program.file} is not the module that {MANIFEST_FILE} describes; export it again"
        )
    return content
