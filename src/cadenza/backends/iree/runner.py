"""`IreeRunner`: `backends.base.Runner` over modules that were compiled ahead, with a thread in
which IREE computes. Invariants: a step is `decode`, a token of each row at most, or `prompt`; state
is donated, so used once; steps run in launch order; nothing runs after `close`. Legend as in
`batch.step_schema`."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import finalize

import iree.runtime as rt
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import Capability, RunnerSetup
from cadenza.backends.iree.manifest import (
    FOLDER,
    MADE_FILE,
    SCOPE,
    Array,
    Manifest,
    ModuleBucket,
    Parameter,
    WireMap,
    read_module,
)
from cadenza.backends.runner_thread import RunnerThread
from cadenza.backends.token_choice import read_result
from cadenza.batch.step_schema import (
    NO_HIDDEN,
    NUM_EXTRA_LOGIT_ROWS,
    Int32Array,
    ModelInputs,
    StepOutput,
)
from cadenza.batch.token_rules import MASK
from cadenza.checkpoint.folder import Checkpoint
from cadenza.errors import CheckpointError, DeviceUnavailableError, RunnerError
from cadenza.models.rope_factors import rope_factors
from cadenza.weights.safetensors_file import open_safetensors
from cadenza.weights.stored_tensor import StoredTensor
from cadenza.weights.weight_format import FORMAT_OF_NAME

# With weights of at most so many bytes, the parts of a step take less time than threads need to
# meet after each of them.
ONE_THREAD_BYTES = 64 << 20

_ELEMENTS = {
    "float32": rt.HalElementType.FLOAT_32,
    "bfloat16": rt.HalElementType.BFLOAT_16,
    "int32": rt.HalElementType.INT_32,
}
_MEMORY = rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE
_USAGE = rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING

Buffer = Any  # `rt.HalBufferView`
ALIGNMENT = 64  # of what IREE uses in place
AnyArray = npt.NDArray[Any]
STEPS = ("decode", "prompt")


class IreeDevice:
    """A device by the name of IREE's driver. Raises DeviceUnavailableError. Buffers and programs
    must be freed before it: otherwise the process ends with a segmentation fault."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instance = rt.VmInstance()
        try:
            self.device = rt.get_driver(self.name).create_default_device()
        except Exception as error:
            raise DeviceUnavailableError(
                f"IREE's {self.name} device cannot be opened, which the modules were compiled for: "
                f"{error}"
            ) from error
        self.hal = rt.create_hal_module(self.instance, self.device)

    def upload(self, values: npt.NDArray[Any]) -> Buffer:
        element = _ELEMENTS[values.dtype.name]
        allocator = self.device.allocator
        return allocator.allocate_buffer_copy(_MEMORY, _USAGE, self.device, values, element)

    def filled(self, array: Array, value: float) -> Buffer:
        sizes, element = list(array.shape), _ELEMENTS[array.dtype]
        dtype = rt.HalElementType.map_to_dtype(element)
        num_bytes = int(np.prod(sizes)) * dtype.itemsize
        buffer = self.device.allocator.allocate_buffer(_MEMORY, _USAGE, num_bytes)
        view = rt.HalBufferView(buffer, sizes, element)
        view.map().asarray(sizes, dtype)[...] = value
        return view

    def read(self, view: Buffer) -> npt.NDArray[Any]:
        dtype = rt.HalElementType.map_to_dtype(view.element_type)
        return np.array(view.map().asarray(view.shape, dtype))


def choose_driver(device: str, weight_bytes: int) -> str:
    """The driver for modules of llvm-cpu: threads with `cpu`, and with `auto` for large enough
    weights. Threads change no bit of a result."""
    is_small = device == "auto" and weight_bytes <= ONE_THREAD_BYTES
    return "local-sync" if is_small else "local-task"


class LoadedProgram:
    """A module on a device, whose function `name` is called; its parameters must outlive it."""

    def __init__(
        self, device: IreeDevice, name: str, module: bytes, parameters: Any | None
    ) -> None:
        instance = device.instance
        loaded = rt.VmModule.copy_buffer(instance, module)
        modules = [device.hal]
        if parameters is not None:
            modules.append(rt.create_io_parameters_module(instance, parameters))
        self._context = rt.VmContext(instance, modules=[*modules, loaded])
        self._function: Any = loaded.lookup_function(name)
        if self._function is None:
            raise CheckpointError(f"a compiled module has no function {name}; export it again")

    def call(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """The results, each in place of the argument that it takes over. Waits without the GIL."""
        given = rt.VmVariantList(len(arguments))
        for each in arguments:
            given.push_ref(each)
        made = rt.VmVariantList(len(arguments))
        self._context.invoke(self._function, given, made)
        return [made.get_as_object(index, rt.HalBufferView) for index in range(made.size)]


class Parameters:
    """The parameters of a model's modules, alive as long as this: tensors that lie aligned, one
    after the other, in a mapped file are used there, others are put together in memory, once."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        made_file = checkpoint.folder / FOLDER / MADE_FILE
        self._made = open_safetensors(made_file)[1] if made_file.exists() else {}
        self.num_copied_bytes = 0  # of those that are not part of a file
        self._arrays = {each.name: self._load(each) for each in manifest.parameters}

    def provider(self) -> rt.ParameterProvider:
        index = rt.ParameterIndex()
        for name, array in self._arrays.items():
            index.add_buffer(name, array)
        return index.create_provider(scope=SCOPE)

    def _load(self, parameter: Parameter) -> AnyArray:
        shape, dtype = parameter.array.shape, _dtype_of(parameter)
        if parameter.rope is not None:
            rope = self._checkpoint.config.ropes[parameter.rope]
            made = np.asarray(rope_factors(rope, self._manifest.max_model_len), dtype)
            return self._copied(parameter, [made])
        stored = [self._entry(name) for name in parameter.tensors or (parameter.name,)]
        if sum(each.num_bytes for each in stored) == 0 or not shape:
            raise CheckpointError(f"the parameter {parameter.name} of {FOLDER}/ has no elements")
        if _is_in_place(stored, dtype):
            first, last = stored[0], stored[-1]
            found = np.frombuffer(first.data, np.uint8, last.stop - first.start, first.start)
            self._check(parameter, found.nbytes)
            return found
        return self._copied(parameter, [np.asarray(each.array(), dtype) for each in stored])

    def _entry(self, name: str) -> StoredTensor:
        weights = self._checkpoint.weights
        if name in self._made:
            return self._made[name]
        if name not in weights or not isinstance(weights.tensors[name], StoredTensor):
            raise CheckpointError(
                f"the compiled modules need the tensor {name}, which the checkpoint does not have "
                f"as floats; export the model again"
            )
        return weights.entry(name)

    def _copied(self, parameter: Parameter, parts: Sequence[AnyArray]) -> AnyArray:
        num_bytes = sum(each.nbytes for each in parts)
        self._check(parameter, num_bytes)
        room = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        whole = room[start : start + num_bytes]
        offset = 0
        for each in parts:
            whole[offset : offset + each.nbytes] = each.reshape(-1).view(np.uint8)
            offset += each.nbytes
        self.num_copied_bytes += num_bytes
        return whole

    def _check(self, parameter: Parameter, num_bytes: int) -> None:
        wanted = int(np.prod(parameter.array.shape)) * _dtype_of(parameter).itemsize
        if num_bytes != wanted:
            raise CheckpointError(
                f"the parameter {parameter.name} has {num_bytes} bytes in the checkpoint, and the "
                f"compiled modules take {wanted}; export the model again"
            )


def _dtype_of(parameter: Parameter) -> np.dtype[Any]:
    found = next((f for f in FORMAT_OF_NAME.values() if f.name == parameter.array.dtype), None)
    if found is None:
        raise CheckpointError(f"parameter {parameter.name} has the type {parameter.array.dtype}")
    return found.numpy


def _is_in_place(stored: Sequence[StoredTensor], dtype: np.dtype[Any]) -> bool:
    first = stored[0]
    return (
        all(FORMAT_OF_NAME[each.dtype].numpy == dtype and each.encoding is None for each in stored)
        and all(each.num_paired_heads is None and each.data is first.data for each in stored)
        and all(before.stop == after.start for before, after in pairwise(stored))
        and first.start % ALIGNMENT == 0
    )


@dataclass(frozen=True, slots=True)
class IreeStepHandle:
    """A launched step, whose rows [L, C] the runner's thread computes."""

    rows: "Future[Int32Array]"
    num_logits: int

    def result(self) -> StepOutput:
        return read_result(self.rows.result()[: self.num_logits], NO_HIDDEN)


class IreeRunner:
    """A model's modules for the rows of `setup.limits`, each of which has a slot."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, setup: RunnerSetup) -> None:
        self._limits = setup.limits
        bucket = find_bucket(manifest, setup)
        self._manifest = manifest
        self._is_warm = False
        self._buckets = tuple(bucket.program(name).num_tokens for name in STEPS)
        self._thread = RunnerThread("iree", lambda: _Steps(checkpoint, manifest, bucket, setup))
        # IREE's objects must be freed in order, also when the interpreter exits.
        self._closing = finalize(self, self._thread.held.close)

    @property
    def name(self) -> str:
        return f"iree:{self._thread.held.device_name} ({self._manifest.target} modules)"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({"logprobs"})

    @property
    def vocab_size(self) -> int:
        return self._manifest.vocab_size

    @property
    def hidden_size(self) -> None:
        return None

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def num_copied_bytes(self) -> int:
        """Of weights that are not used where the checkpoint's file is mapped."""
        return self._thread.held.parameters.num_copied_bytes

    def warmup(self) -> None:
        self._is_warm = True
        for num_tokens in self._buckets:
            inputs = ModelInputs.empty(bucket=num_tokens, num_rows=self._limits.max_num_seqs)
            self.launch(inputs).result()
        self.reset()

    def launch(self, inputs: ModelInputs) -> IreeStepHandle:
        steps = self._thread.held
        if not self._is_warm:
            raise RunnerError("the runner was not warmed up; call warmup() first")
        if len(inputs.tokens.ids) not in self._buckets:
            raise RunnerError(f"no program for {len(inputs.tokens.ids)} tokens")
        self._check(inputs)
        return IreeStepHandle(self._thread.run(lambda: steps.run(inputs)), inputs.num_logits)

    def _check(self, inputs: ModelInputs) -> None:
        if inputs.masks_follow or inputs.image_calls or len(inputs.hidden_rows):
            raise RunnerError("compiled modules have no late masks, images and hidden states")

    def reset(self) -> None:
        self._thread.run(self._thread.held.reset).result()

    def close(self) -> None:
        if self._closing.detach():
            self._thread.close()


def find_bucket(manifest: Manifest, setup: RunnerSetup) -> ModuleBucket:
    """Raises RunnerError if a setup wants what was not compiled."""
    limits, most = setup.limits, manifest.most
    bucket = manifest.bucket(max(limits.max_num_seqs, limits.num_pages))
    is_longer = limits.page_size > most.max_model_len or limits.max_pages_per_seq != 1
    if bucket is None or is_longer or limits.max_num_batched_tokens > most.num_tokens:
        raise RunnerError(f"the compiled modules are for {most}, not for {limits}")
    return bucket


class _Steps:
    def __init__(
        self, checkpoint: Checkpoint, manifest: Manifest, bucket: ModuleBucket, setup: RunnerSetup
    ) -> None:
        self._bucket = bucket
        self._fill = setup.fill or 0.0
        self._device: IreeDevice | None = IreeDevice(
            choose_driver(setup.device, manifest.weight_bytes)
        )
        self.device_name = self._device.name
        self.parameters = Parameters(checkpoint, manifest)
        provider = self.parameters.provider()
        self._programs = {
            each.name: LoadedProgram(
                self._device, each.name, read_module(checkpoint.folder, each), provider
            )
            for each in bucket.programs
        }
        sizes = bucket.num_rows, setup.limits.page_size, manifest
        self._wires = {name: WireMap(bucket.program(name), *sizes) for name in STEPS}
        self._step_names = {bucket.program(name).num_tokens: name for name in STEPS[::-1]}
        self._num_words = manifest.num_rule_words
        self._state: list[Buffer] | None = None
        self.reset()

    def run(self, inputs: ModelInputs) -> Int32Array:
        try:
            return self._compute(inputs)
        except (RunnerError, RuntimeError, ValueError) as error:
            said = str(error)
        # Not from the error: its frames hold buffers, and none may be freed after the device.
        raise RunnerError(said)

    def _compute(self, inputs: ModelInputs) -> Int32Array:
        state = self._updated(inputs)
        name = self._step_names[len(inputs.tokens.ids)]
        words = self._upload(self._wires[name].words(inputs))
        rows = (self._tables.buffer(self._upload), self._records.buffer(self._upload))
        *state, result = self._programs[name].call([words, *rows, *state])
        self._state = state
        assert self._device is not None, "the runner is open"
        return self._device.read(result)

    def reset(self) -> None:
        self._state = None  # frees the old buffers before the new ones are allocated
        device, num_rows = self._device, self._bucket.num_rows
        assert device is not None, "the runner is open"
        *pools, last_sampled, history = self._bucket.state
        self._state = [
            *(device.filled(each, self._fill) for each in pools),
            device.filled(last_sampled, 0),
            device.filled(history, -1),
        ]
        self._tables = _HostArray(np.zeros((num_rows, 1), np.int32))
        num_records = num_rows + NUM_EXTRA_LOGIT_ROWS
        self._records = _HostArray(np.zeros((num_records, self._num_words), np.int32))

    def close(self) -> None:
        """Frees buffers, then programs, then what they were loaded from."""
        self._state = None
        del self._tables, self._records
        self._programs.clear()
        del self.parameters
        self._device = None

    def _updated(self, inputs: ModelInputs) -> list[Buffer]:
        if self._state is None:
            raise RunnerError("the step before this one failed; call reset() first")
        state, self._state = self._state, None
        for row, index, page in inputs.page_updates.tolist():
            self._tables.change()[row, index] = page
        for source, destination, _ in inputs.page_copies.tolist():
            pages = self._upload(np.array([source, destination], np.int32))
            state = self._programs["copy"].call([pages, *state])
        for update in inputs.rule_updates:
            self._records.change()[update.row] = update.record
        for update in inputs.mask_updates:
            records = self._records.change()
            records[update.record, :MASK] = records[update.row, :MASK]
            records[update.record, MASK:] = update.mask
        return state

    def _upload(self, values: Int32Array) -> Buffer:
        assert self._device is not None, "the runner is open"
        return self._device.upload(values)


@dataclass(slots=True, eq=False)
class _HostArray:
    """An array that steps only read, uploaded again when it has changed."""

    values: Int32Array
    _uploaded: Buffer | None = field(default=None)

    def change(self) -> Int32Array:
        self._uploaded = None
        return self.values

    def buffer(self, upload: Callable[[Int32Array], Buffer]) -> Buffer:
        if self._uploaded is None:
            self._uploaded = upload(self.values)
        return self._uploaded
