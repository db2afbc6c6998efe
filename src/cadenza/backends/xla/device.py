"""Resolves `--device` to a JAX device and its memory. `auto` is JAX's default device. A name given
explicitly is never replaced by another: if it is not available, an error gives the reason."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import xla_bridge

from cadenza.errors import ConfigError, DeviceUnavailableError

DEFAULT_FRACTION = 0.75  # of a GPU's memory that JAX takes if the environment does not say how much

_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
_EXTRAS = {"cuda": "cuda13", "tpu": "tpu"}  # JAX's extra that has a kind of device


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
