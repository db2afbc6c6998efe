"""The families of models that see, by model type: `read_vision`, `reader_of`."""

from collections.abc import Mapping, Sequence

from cadenza.json_object import JsonObject
from cadenza.models.model_config import ModelConfig
from cadenza.models.towers.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from cadenza.models.towers.idefics3 import IDEFICS3
from cadenza.models.towers.pixtral import MISTRAL3
from cadenza.models.towers.qwen import QWEN
from cadenza.models.towers.reader import TowerReader, VisionFiles, VisionOptions
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.weights import NameRule

# by the `model_type` of config.json
READERS: Mapping[str, TowerReader] = {
    model_type: reader
    for reader in (IDEFICS3, QWEN, GEMMA3, GEMMA4, GEMMA4_UNIFIED, MISTRAL3)
    for model_type in reader.model_types
}

# the tensors of towers are no part of a model that is opened without one
NO_TOWER: Sequence[NameRule] = [
    (stored, None) for reader in dict.fromkeys(READERS.values()) for stored, _ in reader.names
]


def reader_of(raw: JsonObject) -> TowerReader | None:
    """None for a model without vision."""
    return READERS.get(raw.text("model_type") or "")


def read_vision(
    raw: JsonObject, processor: JsonObject | None, text: ModelConfig, options: VisionOptions
) -> VisionConfig | None:
    """The model's vision; None if it has none, if nothing is known of its processor, or if images
    were not asked for. Raises CheckpointError for what is not supported."""
    reader = reader_of(raw)
    if reader is None or processor is None or not options.has_images:
        return None
    files = VisionFiles(config=raw, processor=processor, text=text, max_tokens=options.max_tokens)
    return reader.read(files)
