"""`DevicePlacement`: on which devices a runner's arrays lie, and how its programs run there. On
several devices (`DeviceMesh`) each has its part of the weights and KV pools, as one array with the
devices along its first axis, and a copy of everything else."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cadenza.backends.xla.ops.split import AXIS

# The weights of the device with this index, as a tree of host arrays.
LoadPart = Callable[[int], Any]


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
    """Several devices of one kind; trees that are in parts have a first axis of devices."""

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
