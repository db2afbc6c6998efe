"""Reading model folders in the Hugging Face layout, and writing random ones.

Owns what a checkpoint is: its shape (`ModelConfig`), its tensors (`Weights`, `declare`) and its
folder (`open_checkpoint`). Knows nothing of devices, engines or text. Invariant: nothing from a
checkpoint is executed, and whatever cannot be read exactly is a `CheckpointError`.
"""

from cadenza.checkpoint.declaration import (
    TensorKind,
    TensorSpec,
    check_weights,
    count_parameters,
    declare,
)
from cadenza.checkpoint.folder import Checkpoint, GenerationDefaults, open_checkpoint
from cadenza.checkpoint.model_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeConfig,
    parse_model_config,
)
from cadenza.checkpoint.random_checkpoint import named_shape, write_random_checkpoint
from cadenza.checkpoint.weights import Weights, open_weights

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "ModelConfig",
    "RopeConfig",
    "TensorKind",
    "TensorSpec",
    "Weights",
    "check_weights",
    "count_parameters",
    "declare",
    "named_shape",
    "open_checkpoint",
    "open_weights",
    "parse_model_config",
    "write_random_checkpoint",
]
