"""`--device` as JAX's devices and their memory, and how arrays and programs lie on them. A name
given explicitly is never replaced by another: if it is not available, an error gives the reason."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cadenza.backends.xla.ops.split import AXIS
from cadenza.errors import ConfigError, DeviceUnavailableError

DEFAULT_FRACTION = 0.75  # of a GPU's memory that JAX takes if the environment does not say how much
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
_EXTRAS = {"cuda": "cuda13", "tpu": "tpu"}  # JAX's extra that has a kind of device
# The weights of the device with this index, as a tree of host arrays.
LoadPart = Callable[[int], Any]


def find_device(name: str) -> Any:
    """The device named `auto`, `cpu`, `cuda`, `cuda:n`, `tpu` or `tpu:n`. Raises ConfigError for
    another form, DeviceUnavailableError if JAX has no such device on this machine."""
    kind, separator, index_text = name.partition(":")
    if name == "auto":
        return jax.devices()[0]
    if kind not in _PLATFORMS or (separator and not index_text.isdecimal()):
        raise ConfigError(f"--device {name!r} is not one of auto, cpu, cuda[:n], tpu[:n]")
    index = int(index_text) if separator else 0
    try:
        devices = jax.devices(_PLATFORMS[kind])
    except RuntimeError:
        devices = []
    if index >= len(devices):
        available = ", ".join(sorted({device.platform for device in jax.devices()}))
        install = f"pip install 'jax[{_EXTRAS[kind]}]', or " if kind in _EXTRAS else ""
        raise DeviceUnavailableError(
            f"--device {name}: this machine has {len(devices)} devices of that kind that JAX can "
            f"use; JAX sees {available}. Remedy: {install}choose another device"
        )
    return devices[index]


def find_devices(name: str, count: int) -> list[Any]:
    first = find_device(name)
    if count == 1:
        return [first]
    all_devices = jax.devices(first.platform)
    found = all_devices[all_devices.index(first) :][:count]
    if len(found) < count:
        remedy = "lower --tensor-parallel-size"
        if first.platform == "cpu":
            remedy += (
                f", or, to try it on one CPU, set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={count}"
            )
        have = "1 device" if len(found) == 1 else f"{len(found)} devices"
        raise DeviceUnavailableError(
            f"--tensor-parallel-size {count}: this machine has {have} from {name} on that JAX can "
            f"use; {remedy}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that JAX's allocator may take of a device, and all that the device has."""

    allocator_bytes: int
    total_bytes: int


def memory_of_device(device: Any, environment: Mapping[str, str]) -> DeviceMemory | None:
    """None if the device uses host memory or does not report its size. JAX reports the bytes of its
    allocator, which are a fixed fraction of a GPU's memory."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    limit = (stats or {}).get("bytes_limit")
    if not limit:
        return None
    fraction = 1.0
    if device.platform == "gpu":
        given = [environment[name] for name in _FRACTION_VARIABLES if environment.get(name)]
        fraction = float(given[0]) if given else DEFAULT_FRACTION
    return DeviceMemory(allocator_bytes=limit, total_bytes=round(limit / fraction))


def reserve_memory(share: float, environment: MutableMapping[str, str]) -> None:
    """Sets the fraction for JAX's allocator, which reads it when the first device is found; a value
    in the environment stays, and none is set when JAX has found its devices."""
    if xla_bridge.backends_are_initialized():
        return
    if not any(environment.get(name) for name in _FRACTION_VARIABLES):
        environment[_FRACTION_VARIABLES[0]] = str(share)


class DevicePlacement(Protocol):
    """Where arrays lie, and programs run."""

    @property
    def platform(self) -> str: ...

    def put(self, load: LoadPart) -> Any: ...

    def abstract(self, tree: Any) -> Any:
        """Shapes of arrays that every device has whole, as arguments to compile with."""
        ...

    def abstract_parts(self, tree: Any) -> Any:
        """The same of arrays that each device has a part of, from the shapes of the parts."""
        ...

    def jit_new(self, function: Callable[[], Any]) -> Any:
        """A function without arguments whose results lie as `wrap` says."""
        ...

    def wrap(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        """The function over all devices, of what each computes. `arguments` and `results` are
        prefixes of their trees: True for arrays that each device has a part of."""
        ...


class SingleDevice:
    """One device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._sharding = SingleDeviceSharding(device)

    @property
    def platform(self) -> str:
        return self._device.platform

    def put(self, load: LoadPart) -> Any:
        return jax.device_put(load(0), self._device)

    def abstract(self, tree: Any) -> Any:
        return _abstract(tree, self._sharding)

    def abstract_parts(self, tree: Any) -> Any:
        return self.abstract(tree)

    def jit_new(self, function: Callable[[], Any]) -> Any:
        return jax.jit(function, out_shardings=self._sharding)

    def wrap(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:  # noqa: ARG002 (nothing is divided)
        return function


class DeviceMesh:
    """Several devices of one kind: each has its part of the weights and KV pools, as one array with
    the devices along its first axis, and a copy of everything else."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._parts = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._whole = NamedSharding(self._mesh, PartitionSpec())

    @property
    def platform(self) -> str:
        return self._devices[0].platform

    def put(self, load: LoadPart) -> Any:
        """One device's part after another is on the host."""
        parts: list[Any] = []
        for index, device in enumerate(self._devices):
            part = jax.tree.map(lambda leaf: np.asarray(leaf)[None], load(index))
            parts.append(jax.device_put(part, device))
        return jax.tree.map(self._joined, *parts)

    def _joined(self, *parts: Any) -> jax.Array:
        shape = (len(parts), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._parts, list(parts))

    def abstract(self, tree: Any) -> Any:
        return _abstract(tree, self._whole)

    def abstract_parts(self, tree: Any) -> Any:
        count = len(self._devices)

        def joined(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (count, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self._parts)

        return jax.tree.map(joined, tree)

    def jit_new(self, function: Callable[[], Any]) -> Any:
        return jax.jit(function)

    def wrap(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        def specs(marks: Any) -> Any:
            of = {True: PartitionSpec(AXIS), False: PartitionSpec()}
            return jax.tree.map(lambda mark: of[mark], marks)

        def on_each(*given: Any) -> Any:
            own = _mapped(lambda leaf: leaf[0], arguments, given)
            return _mapped(lambda leaf: leaf[None], results, function(*own))

        return jax.shard_map(
            on_each,
            mesh=self._mesh,
            in_specs=specs(arguments),
            out_specs=specs(results),
            check_vma=False,
        )


def _mapped(change: Callable[[Any], Any], marks: Any, tree: Any) -> Any:
    return jax.tree.map(
        lambda mark, part: jax.tree.map(change, part) if mark else part, marks, tree
    )


def _abstract(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )
