"""`Manifest`: what a folder of compiled modules contains, written by `cadenza export`, and
`WireMap`, a step's inputs in a module's layout. Invariants: the manifest is that of the model whose
config.json lies beside it, and a module that `read_module` gives has its digest."""

import hashlib
import platform
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from cadenza.backends.base import CompiledSizes
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NO_RULES,
    NO_TARGET,
    PADDING,
    Int32Array,
    ModelInputs,
    StepGroups,
    StepLayout,
    specs_of,
)
from cadenza.errors import CheckpointError, RunnerError
from cadenza.weights.weight_format import WeightDType, item_bytes

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
GROUPS = ("counts", "tokens", "rows", "logits")
STARTS = "rows.query_starts"


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
    """The words [start, stop) of a field of `batch.step_schema`, as `group.name`."""

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


class WireMap:
    """Copies steps of `page_size` tokens a page into words for a program of `num_rows` rows, by the
    names of fields: one that a module does not know has no effect, or the step is refused."""

    def __init__(
        self, program: CompiledProgram, num_rows: int, page_size: int, manifest: Manifest
    ) -> None:
        self._layout = StepLayout(program.num_tokens, num_rows)
        self._program = program
        self._page_size = page_size
        self._slot_size = manifest.max_model_len
        self._vocab_size = manifest.vocab_size
        self._known = {each.name for each in program.fields}

    def words(self, inputs: ModelInputs) -> Int32Array:
        """Raises RunnerError if the step has what the program was not compiled for."""
        own = self._layout.empty_words()
        views = self._layout.views(own)
        self._copy(inputs.groups, views)
        slots = views.tokens.slots
        moved = slots // self._page_size * self._slot_size + slots % self._page_size
        slots[:] = np.where(slots < 0, slots, moved)
        self._check(views)
        packed = np.zeros(max(each.stop for each in self._program.fields), np.int32)
        for field in self._program.fields:
            packed[field.start : field.stop] = self._words_of(field, views)
        return packed

    def _check(self, views: StepGroups[Any]) -> None:
        # The device would not bound an index.
        num_rows = self._layout.num_rows
        num_slots = num_rows * self._slot_size
        for name, values, least, end in (
            ("token id", views.tokens.ids, LAST_SAMPLED, self._vocab_size),
            ("position", views.tokens.positions, 0, self._slot_size),
            ("slot", views.tokens.slots, PADDING, num_slots),
            ("first token of a row", views.rows.query_starts, 0, self._layout.num_tokens + 1),
            ("token of a logit row", views.logits.token_indices, PADDING, self._layout.num_tokens),
            ("row of a logit row", views.logits.rows, 0, num_rows),
            ("position of a logit row", views.logits.positions, 0, self._slot_size + 1),
            ("record of rules", views.logits.rule_record, NO_RULES, self._layout.num_logits),
            ("target", views.logits.targets, NO_TARGET, self._vocab_size),
        ):
            if values.min() < least or values.max() >= end:
                raise RunnerError(
                    f"a {name} of a step is outside [{least}, {end}): {values.min()} to "
                    f"{values.max()}"
                )

    def _copy(self, source: StepGroups[Any], target: StepGroups[Any]) -> None:
        for group in GROUPS:
            ours, theirs = getattr(target, group), getattr(source, group)
            for spec in specs_of(type(ours)):
                given, taken = getattr(theirs, spec.name), getattr(ours, spec.name)
                count = min(len(given), len(taken))
                taken[:count] = given[:count]
                if f"{group}.{spec.name}" == STARTS:
                    taken[count:] = given[-1]
                if f"{group}.{spec.name}" not in self._known and (taken != spec.fill).any():
                    raise RunnerError(
                        f"the compiled modules do not know {group}.{spec.name} of a step, which "
                        f"this one has; export the model again"
                    )

    def _words_of(self, field: WireField, views: StepGroups[Any]) -> Int32Array:
        group, _, name = field.name.partition(".")
        found = getattr(getattr(views, group), name, None)
        if found is None:
            raise RunnerError(f"a step has no {field.name} any more; export the model again")
        return np.ascontiguousarray(found.T).reshape(-1).view(np.int32)


def fields_of(layout: StepLayout) -> tuple[WireField, ...]:
    marks = layout.views(np.arange(layout.num_words, dtype=np.int32))
    found: list[WireField] = []
    for group in GROUPS:
        values = getattr(marks, group)
        for spec in specs_of(type(values)):
            words = getattr(values, spec.name).view(np.int32).reshape(-1)
            start = int(words.min())
            found.append(
                WireField(name=f"{group}.{spec.name}", start=start, stop=start + words.size)
            )
    return tuple(found)
