"""Resolves `--device` for MLX: `find_mlx_device`."""

from dataclasses import dataclass

import mlx.core as mx

from cadenza.errors import ConfigError, DeviceUnavailableError

# Bound of the buffers that MLX keeps for its next allocations; the plan counts them.
CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxDevice:
    """`memory_bytes` is None if the device uses host memory."""

    name: str
    device: mx.Device
    memory_bytes: int | None

    @property
    def described(self) -> tuple[str, ...]:
        info = mx.device_info(self.device)
        return (self.name, *(f"{key} {info[key]}" for key in ("architecture",) if key in info))


def find_mlx_device(name: str) -> MlxDevice:
    """The device called `name`; `auto` is MLX's default. Raises ConfigError for a kind of device
    that MLX does not have, DeviceUnavailableError for one that this machine or build does not
    have."""
    gpu = "metal" if mx.metal.is_available() else "cuda" if mx.device_count(mx.gpu) else None
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = gpu or "cpu"
    if kind not in ("cpu", "metal", "cuda"):
        raise ConfigError(f"--device {name!r} is not one of auto, cpu, cuda[:n], metal with mlx")
    if kind == "cpu":
        return MlxDevice(name="cpu", device=mx.Device(mx.cpu, 0), memory_bytes=None)
    if kind != gpu or int(index or 0) >= mx.device_count(mx.gpu):
        raise DeviceUnavailableError(
            f"--device {name}: this build of MLX has {gpu or 'no GPU'} on this machine; choose "
            f"another device, or install MLX for this one"
        )
    device = mx.Device(mx.gpu, int(index or 0))
    return MlxDevice(name=kind, device=device, memory_bytes=_memory_bytes(device))


def limit_memory(device: MlxDevice) -> None:
    """Bounds MLX's cache of buffers, and what it may allocate on a GPU at all."""
    mx.set_cache_limit(CACHE_BYTES)
    if device.memory_bytes is not None:
        mx.set_memory_limit(device.memory_bytes)
    if device.name == "metal" and device.memory_bytes is not None:
        mx.set_wired_limit(device.memory_bytes)


def _memory_bytes(device: mx.Device) -> int | None:
    info = mx.device_info(device)
    found = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(found) if found else None
