"""`TowerReader`: how the files of one family become a `VisionConfig`. To add a family, write a
module with its reader, and list it in `registry`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.name_rules import REST, NameRule
from cadenza.config import DEFAULT_IMAGE_MAX_TOKENS
from cadenza.vision.tower_config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """What is asked for of a model's images."""

    has_images: bool = True  # False: the text model alone is opened
    # a GGUF file with the tower; None: the one beside the model, if there is one
    projector: Path | None = None
    # of an image whose size is its own; larger ones are reduced
    max_tokens: int = DEFAULT_IMAGE_MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """What a family reads."""

    config: JsonObject  # config.json, of the whole model
    processor: JsonObject  # the settings of its image processor
    text: ModelConfig  # the text model
    max_tokens: int  # as `VisionOptions.max_tokens`

    @property
    def tower(self) -> JsonObject:
        """The settings in `vision_config`; empty if it is absent."""
        return self.config.child("vision_config") or JsonObject({}, self.config.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerReader:
    """A family of models that see."""

    model_types: tuple[str, ...]  # of config.json
    names: tuple[NameRule, ...]  # of the tensors of tower and projectors, all of which are listed
    # the tower and its processor. Raises CheckpointError for what is not supported
    read: Callable[[VisionFiles], VisionConfig]

    def has(self, name: str) -> bool:
        """Whether a tensor of this name belongs to a tower or projector."""
        return name.startswith(tuple(stored.partition(REST)[0] for stored, _ in self.names))
