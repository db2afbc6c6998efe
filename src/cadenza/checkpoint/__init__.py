"""Reads model folders in the Hugging Face layout, and writes random ones.

Owns a checkpoint's configuration (`ModelConfig`), tensors (`Weights`, `declare`) and folder
(`open_checkpoint`). Knows no devices or engines. Invariant: nothing from a checkpoint is executed,
and anything that cannot be read exactly raises `CheckpointError`.
"""

from cadenza.checkpoint.config_json import format_model_config, parse_model_config
from cadenza.checkpoint.declaration import (
    TensorKind,
    TensorSpec,
    check_weights,
    count_parameters,
    declare,
)
from cadenza.checkpoint.folder import (
    Checkpoint,
    OnProgress,
    open_bundled_draft,
    open_checkpoint,
)
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults
from cadenza.checkpoint.hub import Hub, is_hub_id
from cadenza.checkpoint.model_config import LayerKind, ModelConfig
from cadenza.checkpoint.random_checkpoint import named_shape, write_random_checkpoint
from cadenza.checkpoint.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)
from cadenza.checkpoint.score_head import ScoreHead
from cadenza.checkpoint.weights import Weights, open_weights

__all__ = [
    "ASSUMED_OF_GGUF",
    "Checkpoint",
    "GenerationDefaults",
    "Hub",
    "LayerKind",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "LongRopeScaling",
    "ModelConfig",
    "OnProgress",
    "RopeConfig",
    "ScoreHead",
    "TensorKind",
    "TensorSpec",
    "Weights",
    "YarnRopeScaling",
    "check_weights",
    "count_parameters",
    "declare",
    "format_model_config",
    "is_hub_id",
    "named_shape",
    "open_bundled_draft",
    "open_checkpoint",
    "open_weights",
    "parse_model_config",
    "write_random_checkpoint",
]
