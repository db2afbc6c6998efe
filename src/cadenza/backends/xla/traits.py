"""Which op table serves a device, and the `BackendTraits` that follow."""

from collections.abc import Callable
from typing import Any

from cadenza.backends.base import BackendTraits
from cadenza.backends.xla.device import find_device
from cadenza.backends.xla.ops.native_library import has_native_library
from cadenza.backends.xla.ops.reference import MAX_TOKENS, ReferenceOps
from cadenza.backends.xla.ops.table import DecoderSpec, OpTable
from cadenza.config import Ops
from cadenza.errors import ConfigError

DTYPES = ("float32", "bfloat16")

MakeOps = Callable[[DecoderSpec], OpTable]


def find_ops(ops: Ops, device: Any) -> MakeOps:
    """The op table called `ops` on a device; `auto` is the native one where there is one.

    Raises ConfigError when native kernels are asked for and cannot be had.
    """
    is_cpu = device.platform == "cpu"
    if ops == "native" and not is_cpu:
        raise ConfigError(f"--ops native: the native kernels run on cpu, not on {device.platform}")
    if ops == "reference" or not (is_cpu and (ops == "native" or has_native_library())):
        return ReferenceOps
    from cadenza.backends.xla.ops.native import NativeOps

    return NativeOps


def describe(device_name: str, ops: Ops) -> BackendTraits:
    """Raises ConfigError or DeviceUnavailableError as `find_device` and `find_ops` do."""
    device = find_device(device_name)
    stats = device.memory_stats() if device.platform != "cpu" else None
    is_reference = find_ops(ops, device) is ReferenceOps
    stored = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
    return BackendTraits(
        name=f"xla:{device.platform}",
        ops="reference" if is_reference else "native",
        exactness="bitwise",
        dtypes=DTYPES,
        dtype_for=dict.fromkeys(stored, "float32") if is_reference else stored,
        max_num_batched_tokens=MAX_TOKENS if is_reference else _native_budget(),
        device_memory_bytes=None if stats is None else stats.get("bytes_limit"),
    )


def _native_budget() -> int:
    from cadenza.backends.xla.ops.native import DEFAULT_MAX_TOKENS

    return DEFAULT_MAX_TOKENS
