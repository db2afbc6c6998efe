"""Opens model folders, GGUF files and models of the hub, and writes folders.

Invariant: nothing from a checkpoint is executed, and anything that cannot be read exactly raises
`CheckpointError`.

Modules:

- `tensor_formats`: the format of each tensor; plans, bounds and loading follow. Beside int4 the
  first layer has 8 bits: its error passes through all others, and calibrating the rest instead
  would need text and minutes, and codes that depend on the machine
- `quantised_folder`: the folder that `cadenza quantize` writes
- `new_folder`: a folder that is written whole, with another's small files
- `described_family`: models of unknown types, by a file beside them
- `mtp_head`: an MTP layer of a model as a model of one layer
- `stacked_experts`: how names, and tensors of all experts, become the declared ones
- `opening`: `open_checkpoint`, of a folder or a GGUF file
- `folder`: an opened model, `Checkpoint`; the reader of folders, those of base models too
- `hub`: folders of the hub's models, and whether a network drops what is sent to it
- `hub_cache`: those in its local cache, listed and removed
- `survey`: what a refused folder contains, for its error message
- `tokenizer_files`, `generation_defaults`, `pooling_files`: a folder's tokenizer settings,
  recommended sampling and pooling
- `random_checkpoint`: random weights of a named or given shape (`shapes/`)
"""

from cadenza.checkpoint.folder import Checkpoint, OnProgress
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults
from cadenza.checkpoint.hub import Hub, is_hub_id
from cadenza.checkpoint.opening import open_bundled_draft, open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, read_shape, write_random_checkpoint
from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import check_weights, count_parameters, declare
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)
from cadenza.models.score_head import ScoreHead
from cadenza.weights.tensor_spec import TensorKind, TensorSpec
from cadenza.weights.weights import Weights, open_weights

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
    "is_hub_id",
    "named_shape",
    "open_bundled_draft",
    "open_checkpoint",
    "open_weights",
    "parse_model_config",
    "read_shape",
    "write_random_checkpoint",
]
