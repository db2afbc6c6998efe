"""IREE's devices: their buffers, and the modules that run on them: `IreeDevice`, `LoadedProgram`. A
donated buffer holds the result afterwards, so it is used once. Buffers and programs must be freed
before their device: otherwise the process ends with a segmentation fault."""

from collections.abc import Sequence
from typing import Any

import iree.runtime as rt
import numpy as np
import numpy.typing as npt

from cadenza.backends.iree.manifest import Array
from cadenza.errors import CheckpointError, DeviceUnavailableError

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


class IreeDevice:
    """A device by the name of IREE's driver. Raises DeviceUnavailableError."""

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
