"""`TowerReader`: how the files of one family become a `VisionConfig`.

To add a family, write a module with its reader, and list it in `registry`.
"""

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
    """What is asked for of a model's images.

    Args:
        has_images: False: the text model alone is opened.
        projector: a GGUF file with the tower; None: the one beside the model, if there is one.
        max_tokens: of an image whose size is its own; larger ones are reduced.
    """

    has_images: bool = True
    projector: Path | None = None
    max_tokens: int = DEFAULT_IMAGE_MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """What a family reads.

    Args:
        config: config.json, of the whole model.
        processor: the settings of its image processor.
        text: the text model.
        max_tokens: as `VisionOptions.max_tokens`.
    """

    config: JsonObject
    processor: JsonObject
    text: ModelConfig
    max_tokens: int

    @property
    def tower(self) -> JsonObject:
        """The settings in `vision_config`; empty if it is absent."""
        return self.config.child("vision_config") or JsonObject({}, self.config.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerReader:
    """A family of models that see.

    Args:
        model_types: of config.json.
        names: of the tensors of tower and projectors, all of which are listed.
        read: the tower and its processor. Raises CheckpointError for what is not supported.
    """

    model_types: tuple[str, ...]
    names: tuple[NameRule, ...]
    read: Callable[[VisionFiles], VisionConfig]

    def has(self, name: str) -> bool:
        """Whether a tensor of this name belongs to a tower or projector."""
        return name.startswith(tuple(stored.partition(REST)[0] for stored, _ in self.names))
