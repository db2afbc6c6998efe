"""Reads model folders in the Hugging Face layout, and writes random ones.

Owns a checkpoint's configuration (`ModelConfig`), tensors (`Weights`, `declare`) and folder
(`open_checkpoint`). Invariant: nothing from a checkpoint is executed, and anything that cannot be
read exactly raises `CheckpointError`.

Modules:

- `model_config`: `ModelConfig`, everything that the arithmetic of a model depends on
- `layer_kind`: `LayerKind`, the heads or the recurrence of a layer, and groups of equal KV
- `outline`: `ModelOutline`, what is known of a model whose arithmetic a backend brings
- `config_json`: strict reading of config.json
- `rope_config`, `rope_factors`: rotary settings, and their cosines and sines
- `host_math`: logarithms, powers, cosines and sines with the same bits on every machine
- `tensor_spec`: a tensor, a linear, and what the kinds of layers consist of
- `declaration`: every tensor, declared once; loading and random weights follow
- `operations`: what a token costs by a shape alone
- `weight_format`: how the elements of a tensor are held in memory: floats, or integer codes
- `tensor_formats`: the format of each tensor; plans, bounds and loading follow. Beside int4 the
  first layer has 8 bits: its error passes through all others, and calibrating the rest instead
  would need text and minutes, and codes that depend on the machine
- `float8_weight`: weights in float8_e4m3fn with scales
- `quantised_weight`: weights as integer codes with scales, and the rounding that makes them
- `block_weight`: weights in the quantised blocks of a file, as it is mapped
- `stored_tensor`, `safetensors_file`, `weights`: memory-mapped tensors, and weights that are stored
  quantised in tensors of other names
- `safetensors_writer`: tensors into files
- `quantised_folder`: the folder that `cadenza quantize` writes
- `new_folder`: a folder that is written whole, with another's small files
- `described_family`: models of unknown types, by a file beside them
- `tower_spec`: the tensors of an image tower (`towers/` reads the settings of models that see)
- `wrapped_text`: the text model of a checkpoint that has towers for images or sound
- `score_head`: the head of models that score a text
- `split`: the part of each of several devices that share a model
- `sparse_support`: the models that compute sparse prompts, and those that score prompts
- `mtp_layout`: how the MTP layers of each family are stored and fed
- `mtp_head`: an MTP layer of a model as a model of one layer
- `name_rules`, `stacked_experts`: how names, and tensors of all experts, become the declared ones
- `opening`: `open_checkpoint`, of a folder or a GGUF file
- `folder`: an opened model, `Checkpoint`; the reader of folders, those of base models too
- `hub`: folders of the hub's models, and whether a network drops what is sent to it
- `hub_cache`: those in its local cache, listed and removed
- `other_folders`: folders of the hub's cache, and of LoRA adapters
- `survey`: what a refused folder contains, for its error message
- `tokenizer_files`, `generation_defaults`, `pooling_files`: a folder's tokenizer settings,
  recommended sampling and pooling
- `random_checkpoint`: random weights of a named or given shape (`shapes/`)
- `dtypes`, `json_object`: element types; typed access to untrusted JSON
"""

from cadenza.checkpoint.config_json import parse_model_config
from cadenza.checkpoint.declaration import check_weights, count_parameters, declare
from cadenza.checkpoint.folder import Checkpoint, OnProgress
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults
from cadenza.checkpoint.hub import Hub, is_hub_id
from cadenza.checkpoint.layer_kind import LayerKind
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.opening import open_bundled_draft, open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, read_shape, write_random_checkpoint
from cadenza.checkpoint.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)
from cadenza.checkpoint.score_head import ScoreHead
from cadenza.checkpoint.tensor_spec import TensorKind, TensorSpec
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
    "is_hub_id",
    "named_shape",
    "open_bundled_draft",
    "open_checkpoint",
    "open_weights",
    "parse_model_config",
    "read_shape",
    "write_random_checkpoint",
]
