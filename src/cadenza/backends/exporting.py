"""`cadenza export`: a model's step from `xla`, compiled for `iree`, and its folder. A parameter is
one tensor of the checkpoint, or several joined, perhaps in another type, found by its contents, so
that no family has to list them. Tensors lie in the order of the parameters: each is one range of a
file, which processes map and share."""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import RunnerSetup
from cadenza.backends.iree.manifest import (
    FOLDER,
    FORMAT,
    MADE_FILE,
    MANIFEST_FILE,
    Array,
    CompiledProgram,
    Cpu,
    Manifest,
    ModuleBucket,
    Parameter,
    fields_of,
    sha256_of,
)
from cadenza.backends.token_choice import NUM_COLUMNS
from cadenza.backends.xla.export import MAX_TOKENS, ExportedModel, export_programs
from cadenza.batch.step_schema import StepLayout
from cadenza.batch.token_rules import RuleLayout
from cadenza.checkpoint.folder import Checkpoint, copy_small_files, writing_folder
from cadenza.config import PAGE_SIZE_UNIT, EngineLimits
from cadenza.errors import CheckpointError, ConfigError
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_factors import rope_factors
from cadenza.weights.safetensors_file import NewTensor, Part, write_shards
from cadenza.weights.weight_format import FORMAT_OF_NAME, StoredDType, WeightDType
from cadenza.weights.weights import Weights

Target = Literal["llvm-cpu", "vulkan-spirv", "cuda"]
CpuChoice = Literal["generic", "host"]

DEFAULT_ROWS = (4, 8)
DEFAULT_MAX_MODEL_LEN = 4096

OnCompiled = Callable[[str], object]  # Called with the file of a module before it is compiled
AnyArray = npt.NDArray[Any]
_PROBE_BYTES = 64  # the bytes at a tensor's start by which it is looked up
PACKAGE = "iree-base-compiler"
REQUIREMENT = f"{PACKAGE}==3.13.0"  # The runtime's version, which decides the bits, too
COMPILE_S = 3600.0  # a compilation is given up after so many seconds
_COMMON = ("--iree-input-type=stablehlo", "--iree-vm-bytecode-module-strip-source-map=true")
_OF_TARGET: dict[Target, tuple[str, ...]] = {
    "llvm-cpu": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-debug-symbols=false",
    ),
    "vulkan-spirv": ("--iree-hal-target-device=vulkan",),
    "cuda": ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_80"),
}
_MAX_MESSAGE_CHARS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is compiled: modules for each of `num_rows`, and contexts of `max_model_len` tokens."""

    num_rows: tuple[int, ...] = DEFAULT_ROWS
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    dtype: WeightDType = "float32"
    target: Target = "llvm-cpu"
    cpu: CpuChoice = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """A manifest, the modules by their files, and the parameters that are no tensors."""

    manifest: Manifest
    files: dict[str, bytes]
    made: dict[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])


def make_modules(
    checkpoint: Checkpoint, options: ExportOptions, on_compiled: OnCompiled = lambda _: None
) -> Modules:
    """Raises CheckpointError for a model that cannot be exported, ConfigError if the options do not
    fit it or the compiler is missing or failed."""
    compiler = compiler_version()
    check_exported(checkpoint, options)
    exported = {rows: _export(checkpoint, options, rows) for rows in options.num_rows}
    first = next(iter(exported.values()))
    flags, files = compiler_flags(options.target, options.cpu), dict[str, bytes]()
    buckets = list[ModuleBucket]()
    for rows, model in exported.items():
        programs = list[CompiledProgram]()
        for each in model.programs:
            name = f"rows{rows}-{each.name}.vmfb"
            on_compiled(name)
            files[name] = compile_module(each.text, flags)
            programs.append(_program(each.name, name, files[name], rows))
        state = tuple(Array(shape=each.shape, dtype=each.dtype.name) for each in model.state)
        buckets.append(ModuleBucket(num_rows=rows, state=state, programs=tuple(programs)))
    parameters = _parameters(checkpoint, options, first)
    made = {
        each.name: first.weights[each.name]
        for each in parameters
        if not each.tensors and each.rope is None
    }
    model, cpu = checkpoint.config, Cpu.of_this_machine()
    is_own = options.target == "llvm-cpu" and options.cpu == "host"
    manifest = Manifest(
        format=FORMAT,
        config=sha256_of((checkpoint.folder / CONFIG_FILE).read_bytes()),
        compiler=compiler,
        target=options.target,
        flags=flags,
        architecture=cpu.architecture,
        features=tuple(sorted(cpu.flags)) if is_own else (),
        dtype=options.dtype,
        vocab_size=model.vocab_size,
        max_model_len=options.max_model_len,
        num_rule_words=RuleLayout(model.vocab_size).num_words,
        num_columns=NUM_COLUMNS,
        parameters=parameters,
        buckets=tuple(buckets),
    )
    return Modules(manifest=manifest, files=files, made=made)


def check_exported(checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Raises CheckpointError or ConfigError for what is not exported."""
    if checkpoint.format == "gguf" or checkpoint.scheme is not None:
        stored = "a GGUF file" if checkpoint.scheme is None else f"as {checkpoint.scheme.name}"
        raise CheckpointError(f"the checkpoint is stored {stored}; export a folder of floats")
    model = checkpoint.config
    for is_so, what in (
        (not checkpoint.can_generate, "embeds texts and generates none"),
        (model.recurrence is not None, "has recurrent states"),
        (model.vision is not None, "takes images"),
    ):
        if is_so:
            raise CheckpointError(f"the model {what}; such a model is not exported")
    if options.dtype == "float16":
        raise ConfigError("--dtype float16 is not exported; use float32 or bfloat16")
    longest = model.max_position_embeddings
    if not PAGE_SIZE_UNIT <= options.max_model_len <= longest or (
        options.max_model_len % PAGE_SIZE_UNIT
    ):
        raise ConfigError(
            f"--max-model-len {options.max_model_len} must be a multiple of {PAGE_SIZE_UNIT} from "
            f"{PAGE_SIZE_UNIT} to the model's {longest} positions"
        )
    if not options.num_rows or not all(1 <= each <= MAX_TOKENS for each in options.num_rows):
        raise ConfigError(
            f"--max-num-seqs {','.join(map(str, options.num_rows))} must be numbers of rows from 1 "
            f"to {MAX_TOKENS}, such as 4,8"
        )


def _export(checkpoint: Checkpoint, options: ExportOptions, num_rows: int) -> ExportedModel:
    limits = EngineLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=options.max_model_len,
        page_size=options.max_model_len,
        num_pages=num_rows,
        max_num_queued_reqs=num_rows,
    )
    setup = RunnerSetup(limits=limits, dtype=options.dtype)
    return export_programs(checkpoint.config, checkpoint.weights, setup)


def _program(name: str, file: str, content: bytes, num_rows: int) -> CompiledProgram:
    sizes = {"decode": (num_rows, num_rows), "prompt": (MAX_TOKENS, 0)}
    num_tokens, num_logits = sizes.get(name, (0, 0))
    layout = StepLayout(num_tokens, num_rows)
    return CompiledProgram(
        name=name,
        file=file,
        sha256=sha256_of(content),
        num_tokens=num_tokens,
        num_logits=num_logits or (layout.num_logits if num_tokens else 0),
        fields=fields_of(layout) if num_tokens else (),
    )


def _parameters(
    checkpoint: Checkpoint, options: ExportOptions, exported: ExportedModel
) -> tuple[Parameter, ...]:
    model = checkpoint.config
    names = [spec.name for spec in declare(model)]
    longest = options.max_model_len
    return find_parameters(model, checkpoint.weights, names, exported.weights, longest)


def find_parameters(
    model: ModelConfig,
    weights: Weights,
    names: Iterable[str],
    exported: Mapping[str, AnyArray],
    max_model_len: int,
) -> tuple[Parameter, ...]:
    """The tensors of these names that each exported array is made of."""
    tensors = {name: weights.array(name) for name in names}
    search = _Search(model, tensors, max_model_len)
    return tuple(search.find(name, array) for name, array in exported.items())


class _Search:
    def __init__(
        self, model: ModelConfig, tensors: Mapping[str, AnyArray], max_model_len: int
    ) -> None:
        self._tensors = tensors
        self._ropes = [np.asarray(rope_factors(rope, max_model_len)) for rope in model.ropes]
        self._by_type: dict[str, dict[bytes, list[str]]] = {}

    def find(self, name: str, array: AnyArray) -> Parameter:
        shape = Array(shape=array.shape, dtype=array.dtype.name)
        for index, rope in enumerate(self._ropes):
            if rope.dtype == array.dtype and np.array_equal(rope, array):
                return Parameter(name=name, array=shape, rope=index)
        return Parameter(name=name, array=shape, tensors=self._parts(array))

    def _parts(self, array: AnyArray) -> tuple[str, ...]:
        """The tensors that an array is a concatenation of; empty if there are none."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found: list[str] = []
        place = 0
        while place < len(content):
            name = self._at(content[place:], array.dtype)
            if name is None:
                return ()
            found.append(name)
            place += self._tensors[name].size * array.dtype.itemsize
        return tuple(found)

    def _at(self, content: AnyArray, dtype: np.dtype[Any]) -> str | None:
        for name in self._starting(dtype).get(content[:_PROBE_BYTES].tobytes(), ()):
            wanted = self._tensors[name].astype(dtype).reshape(-1).view(np.uint8)
            if np.array_equal(content[: len(wanted)], wanted):
                return name
        return None

    def _starting(self, dtype: np.dtype[Any]) -> dict[bytes, list[str]]:
        """The tensors by their first bytes, converted to that type."""
        if dtype.name not in self._by_type:
            found: dict[bytes, list[str]] = defaultdict(list)
            for name, tensor in self._tensors.items():
                first = tensor.reshape(-1)[: _PROBE_BYTES // dtype.itemsize].astype(dtype)
                found[first.tobytes()].append(name)
            self._by_type[dtype.name] = found
        return self._by_type[dtype.name]


def compiler_flags(target: Target, cpu: CpuChoice) -> tuple[str, ...]:
    """The compiler's flags. `cpu` counts for llvm-cpu only."""
    flags = (*_COMMON, *_OF_TARGET[target])
    if target != "llvm-cpu":
        return flags
    triple = f"--iree-llvmcpu-target-triple={platform.machine()}-unknown-linux-gnu"
    return (*flags, triple, f"--iree-llvmcpu-target-cpu={cpu}")


def compiler_version(find: Callable[[str], object | None] = find_spec) -> str:
    try:
        is_missing = find("iree.compiler") is None
    except ModuleNotFoundError:  # of the package `iree`
        is_missing = True
    if is_missing:
        raise ConfigError(
            f"`cadenza export` needs {PACKAGE}, which this installation lacks; "
            f"pip install {REQUIREMENT}"
        )
    return version(PACKAGE)


def compile_module(text: str, flags: tuple[str, ...]) -> bytes:
    """The module of a program's text. Raises ConfigError with what the compiler says."""
    with tempfile.TemporaryDirectory() as name:
        source, made = Path(name) / "program.mlir", Path(name) / "program.vmfb"
        source.write_text(text, encoding="utf-8")
        command = [str(_compiler()), str(source), *flags, "-o", str(made)]
        done = subprocess.run(  # noqa: S603 (our own arguments)
            command, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode:
            said = done.stderr.replace(str(source), "program")[:_MAX_MESSAGE_CHARS]
            raise ConfigError(f"IREE's compiler failed ({done.returncode}): {said}")
        return made.read_bytes()


def _compiler() -> Path:
    """In the scripts folder beside this interpreter, where pip installs it."""
    return Path(sys.executable).parent / "iree-compile"


def export_folder(
    checkpoint: Checkpoint,
    out: Path,
    options: ExportOptions,
    on_compiled: OnCompiled = lambda _: None,
) -> Modules:
    """Writes a new folder and returns the modules. Raises CheckpointError, ConfigError."""
    with writing_folder(out) as folder:
        modules = make_modules(checkpoint, options, on_compiled)
        write_model(checkpoint, modules, folder)
    return modules


def write_model(checkpoint: Checkpoint, modules: Modules, folder: Path) -> None:
    """Into an empty folder. Raises OSError."""
    copy_small_files(checkpoint.folder, folder)
    shutil.copyfile(checkpoint.folder / CONFIG_FILE, folder / CONFIG_FILE)
    write_shards(folder, list(_parts(checkpoint, modules.manifest)))
    write_modules(modules, folder)


def write_modules(modules: Modules, folder: Path) -> None:
    """Writes the modules, their manifest and the parameters that are no tensors. Raises OSError."""
    inner = folder / FOLDER
    inner.mkdir(exist_ok=True)
    for name, content in modules.files.items():
        (inner / name).write_bytes(content)
    if modules.made:
        parts = [_part([(name, value.dtype.name, value)]) for name, value in modules.made.items()]
        write_shards(inner, parts)
        (inner / "model.safetensors").replace(inner / MADE_FILE)
    (inner / MANIFEST_FILE).write_bytes(encode_manifest(modules.manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _parts(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Part]:
    """The tensors of each parameter together, then those of no parameter."""
    weights, written = checkpoint.weights, set[str]()
    groups = [(each.tensors, each.array.dtype) for each in manifest.parameters]
    groups += [((spec.name,), manifest.dtype) for spec in declare(checkpoint.config)]
    for names, dtype in groups:
        new = [name for name in names if name not in written]
        written.update(new)
        if new:
            yield _part([(name, dtype, weights.array(name)) for name in new])


def _part(tensors: list[tuple[str, str, Any]]) -> Part:
    stored = {each.name: each for each in FORMAT_OF_NAME.values()}
    new = [
        NewTensor(name=name, dtype=_stored(dtype), shape=array.shape)
        for name, dtype, array in tensors
    ]
    return Part(
        tensors=tuple(new),
        make=lambda: (
            np.asarray(array).astype(stored[_stored(dtype)].numpy) for _, dtype, array in tensors
        ),
    )


def _stored(dtype: str) -> StoredDType:
    return next(name for name in FORMAT_OF_NAME if name == dtype)
