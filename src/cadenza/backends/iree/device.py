"""IREE's devices: their buffers, and the modules that run on them: `IreeDevice`, `LoadedProgram`.

Knows nothing of models. A buffer that a program takes over holds its result afterwards, so that
what is donated is used once.
"""

from collections.abc import Sequence
from typing import Any

import iree.runtime as rt
import numpy as np
import numpy.typing as npt

from cadenza.backends.iree.manifest import Array
from cadenza.errors import CheckpointError, DeviceUnavailableError

DRIVERS = {"llvm-cpu": "local-task", "vulkan-spirv": "vulkan"}
"""By the target that modules were compiled for."""

_ELEMENTS = {
    "float32": rt.HalElementType.FLOAT_32,
    "bfloat16": rt.HalElementType.BFLOAT_16,
    "int32": rt.HalElementType.INT_32,
}
_MEMORY = rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE
_USAGE = rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING

Buffer = Any
"""`rt.HalBufferView`."""


class IreeDevice:
    """A device for modules of a target. Raises DeviceUnavailableError."""

    def __init__(self, target: str) -> None:
        self.name = DRIVERS[target]
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
        """A new buffer with a copy of an array."""
        element = _ELEMENTS[values.dtype.name]
        allocator = self.device.allocator
        return allocator.allocate_buffer_copy(_MEMORY, _USAGE, self.device, values, element)

    def filled(self, array: Array, value: float) -> Buffer:
        """A new buffer with equal elements."""
        sizes, element = list(array.shape), _ELEMENTS[array.dtype]
        dtype = rt.HalElementType.map_to_dtype(element)
        num_bytes = int(np.prod(sizes)) * dtype.itemsize
        buffer = self.device.allocator.allocate_buffer(_MEMORY, _USAGE, num_bytes)
        view = rt.HalBufferView(buffer, sizes, element)
        view.map().asarray(sizes, dtype)[...] = value
        return view

    def read(self, view: Buffer) -> npt.NDArray[Any]:
        """A copy of a buffer's elements, once what writes it has run."""
        dtype = rt.HalElementType.map_to_dtype(view.element_type)
        return np.array(view.map().asarray(view.shape, dtype))


class LoadedProgram:
    """A module on a device, whose function `name` is called; the parameters must outlive it."""

    def __init__(self, device: IreeDevice, name: str, module: bytes, parameters: Any) -> None:
        instance = device.instance
        loaded = rt.VmModule.copy_buffer(instance, module)
        provided = rt.create_io_parameters_module(instance, parameters)
        modules = [device.hal, provided, loaded]
        self._context = rt.VmContext(instance, modules=modules)
        self._function: Any = loaded.lookup_function(name)
        if self._function is None:
            raise CheckpointError(f"a compiled module has no function {name}; export it again")

    def call(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """The results, of which IREE makes each in place of the argument that it was compiled to
        take over. Waits for them, without the GIL."""
        given = rt.VmVariantList(len(arguments))
        for each in arguments:
            given.push_ref(each)
        made = rt.VmVariantList(len(arguments))
        self._context.invoke(self._function, given, made)
        return [made.get_as_object(index, rt.HalBufferView) for index in range(made.size)]
