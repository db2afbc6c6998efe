"""Which op table serves a device, and the `BackendTraits` that follow."""

from collections.abc import Callable
from typing import Any

from cadenza.backends.base import BackendTraits
from cadenza.backends.xla.device import find_device
from cadenza.backends.xla.ops.native_library import has_native_library
from cadenza.backends.xla.ops.reference import MAX_TOKENS, ReferenceOps
from cadenza.backends.xla.ops.table import DecoderSpec, OpTable
from cadenza.checkpoint.dtypes import WeightDType
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.config import Ops
from cadenza.errors import ConfigError

NATIVE_HEAD_UNIT = 16
"""Head sizes that the native attention takes are multiples of this, up to `MAX_NATIVE_HEAD`."""

MAX_NATIVE_HEAD = 512

DTYPES: tuple[WeightDType, ...] = ("float32", "bfloat16")

MakeOps = Callable[[DecoderSpec], OpTable]


def find_ops(ops: Ops, device: Any, model: ModelConfig) -> MakeOps:
    """The op table called `ops` on a device; `auto` is the native one where it can be had.

    Raises ConfigError when native kernels are asked for and cannot be had.
    """
    obstacle = _obstacle_to_native(device, model)
    if ops == "native" and obstacle is not None:
        raise ConfigError(f"--ops native: {obstacle}; use --ops auto")
    if ops == "reference" or obstacle is not None:
        return ReferenceOps
    from cadenza.backends.xla.ops.native import NativeOps

    return NativeOps


def _obstacle_to_native(device: Any, model: ModelConfig) -> str | None:
    """Why the native kernels cannot serve a model on a device."""
    if device.platform != "cpu":
        return f"the native kernels run on cpu, not on {device.platform}"
    if model.head_dim % NATIVE_HEAD_UNIT or model.head_dim > MAX_NATIVE_HEAD:
        return (
            f"heads of {model.head_dim} values are not a multiple of {NATIVE_HEAD_UNIT} "
            f"of at most {MAX_NATIVE_HEAD}"
        )
    return None if has_native_library() else "this installation was built without a C++ compiler"


def describe(device_name: str, ops: Ops, model: ModelConfig) -> BackendTraits:
    """Raises ConfigError or DeviceUnavailableError as `find_device` and `find_ops` do."""
    device = find_device(device_name)
    stats = device.memory_stats() if device.platform != "cpu" else None
    is_reference = find_ops(ops, device, model) is ReferenceOps
    stored: dict[WeightDType, WeightDType] = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "float16": "bfloat16",
    }
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
