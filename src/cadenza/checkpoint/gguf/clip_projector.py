"""A projector of llama.cpp's `clip` files: what is taken as given for it, where its tensors lie.
`mmproj` reads the files; the families' modules say what theirs mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.gguf.reader import GGUFFile
from cadenza.checkpoint.gguf.tensors import cut_parts, lacking
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.model_config import ModelConfig
from cadenza.models.tower_spec import NormSpec, TowerSpec
from cadenza.models.towers.reader import TowerReader
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import LinearSpec, TensorSpec

VISION_PREFIX = "clip.vision."

# declared tensors by the name of the stored one that holds them, concatenated
TensorMap = dict[str, tuple[TensorSpec, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFile:
    """An open file, and what its reader needs of the text model."""

    file: GGUFFile
    text: ModelConfig
    tokens: list[str]  # of the text model's vocabulary

    @property
    def metadata(self) -> JsonObject:
        return self.file.header.metadata

    def vision(self, key: str) -> object:
        return _plain(self.metadata.get(f"{VISION_PREFIX}{key}"))

    def token_id(self, token: str) -> int:
        """Of the text model's vocabulary. Raises CheckpointError."""
        if token not in self.tokens:
            raise CheckpointError(
                f"{self.metadata.where} is for models with the token {shorten(token)}, which this "
                f"one has not; choose the file that belongs to the model, or --no-images"
            )
        return self.tokens.index(token)

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A stored tensor of this shape. Raises CheckpointError."""
        if name not in self.file.header.tensors:
            raise lacking(self.metadata.where, [name])
        spec = TensorSpec(name=name, shape=shape, kind="tower")
        (found,) = cut_parts(self.file.header.tensors[name], (spec,), self.file.mapped)
        return found


def _nothing(file: ProjectorFile, vision: VisionConfig) -> dict[str, StoredWeight]:  # noqa: ARG001
    return {}


def _map_nothing(vision: VisionConfig, tower: TowerSpec) -> TensorMap:  # noqa: ARG001
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipProjector:
    """What llama.cpp means by one `clip.projector_type`."""

    reader: TowerReader  # of the family's folders
    # the entries of config.json; what the file does not say stands here
    config: Callable[[ProjectorFile], dict[str, object]]
    # the settings of the image processor, likewise
    processor: Callable[[ProjectorFile], dict[str, object]]
    # the declared tensors of the projectors by their stored names
    projectors: Callable[[TowerSpec], TensorMap]
    # those of the projectors after layers of the tower
    deepstack: Callable[[VisionConfig, TowerSpec], TensorMap] = _map_nothing
    # tensors that are stored otherwise than in one piece, by their declared names
    made: Callable[[ProjectorFile, VisionConfig], dict[str, StoredWeight]] = _nothing


def siglip_settings(file: ProjectorFile) -> dict[str, object]:
    """The entries of a `vision_config` that all towers' files have."""
    keys = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "layer_norm_eps": "attention.layer_norm_epsilon",
    }
    return {name: file.vision(key) for name, key in keys.items()}


def normalisation_settings(file: ProjectorFile) -> dict[str, object]:
    return {name: file.vision(name) for name in ("image_mean", "image_std")}


def map_linear(name: str, linear: LinearSpec) -> TensorMap:
    tensors: TensorMap = {f"{name}.weight": (linear.weight_spec,)}
    if linear.bias is not None:
        tensors[f"{name}.bias"] = tuple(linear.tensors())[1:]
    return tensors


def map_norm(name: str, norm: NormSpec | None) -> TensorMap:
    if norm is None:
        return {}
    tensors: TensorMap = {f"{name}.weight": (norm.weight,)}
    if norm.bias is not None:
        tensors[f"{name}.bias"] = (norm.bias,)
    return tensors


def _plain(value: object) -> object:
    """A value of the metadata as config.json has it."""
    if not isinstance(value, np.ndarray):
        return value
    array = cast(npt.NDArray[Any], value)
    if array.dtype.kind == "f":
        return [float(str(each)) for each in array]
    return [int(each) for each in array]
