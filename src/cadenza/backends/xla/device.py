"""`--device`: finds the device that was asked for, or says by name why there is none.

Never falls back: `auto` takes what JAX offers first, anything else is that or an error.
"""

from typing import Any

import jax

from cadenza.errors import ConfigError, DeviceUnavailableError

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


def find_device(name: str) -> Any:
    """The device called `auto`, `cpu`, `cuda`, `cuda:n`, `tpu` or `tpu:n`.

    Raises:
        ConfigError: the name has another form.
        DeviceUnavailableError: there is no such device here.
    """
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
        install = "" if kind == "cpu" else f"pip install 'cadenza[{kind}]', or "
        raise DeviceUnavailableError(
            f"--device {name}: this machine has {len(devices)} devices of that kind that JAX can "
            f"use; JAX sees {available}. Remedy: {install}choose another device"
        )
    return devices[index]
