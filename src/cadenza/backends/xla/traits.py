"""`BackendTraits` of the XLA backend on a device."""

from cadenza.backends.base import BackendTraits
from cadenza.backends.xla.device import find_device
from cadenza.backends.xla.ops.reference import MAX_TOKENS, ReferenceOps


def describe(device_name: str) -> BackendTraits:
    """Raises ConfigError or DeviceUnavailableError as `find_device` does."""
    device = find_device(device_name)
    stats = device.memory_stats() if device.platform != "cpu" else None
    return BackendTraits(
        name=f"xla:{device.platform}",
        ops=ReferenceOps.name,
        exactness="bitwise",
        dtypes=("float32", "bfloat16"),
        max_num_batched_tokens=MAX_TOKENS,
        device_memory_bytes=None if stats is None else stats.get("bytes_limit"),
    )
