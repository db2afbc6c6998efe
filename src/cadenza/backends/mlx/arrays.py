"""Host arrays on the device: `to_device`."""

from typing import Any

import mlx.core as mx
import numpy as np


def to_device(values: Any) -> mx.array:
    """A numpy array of any type and layout as an array of MLX."""
    return mx.array(np.ascontiguousarray(values))
