"""`ModelFacts`: what clients see of a model besides its name. Knows no engine. Invariant: nothing
changes after the checkpoint was opened, and nothing holds its files open."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.folder import Checkpoint
from cadenza.models.declaration import count_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as it is stored. `name`: of its folder or file, or of its repository on a hub.
    `num_parameters`: None for models that only a backend can read, as `num_bytes`. `stored_type`:
    of most bytes of the weights, such as `bfloat16` or `Q4_K`. `max_position_embeddings`: of
    tokens, that the model was made for."""

    name: str
    family: str
    format: Literal["safetensors", "gguf"]
    digest: str
    num_parameters: int | None
    num_bytes: int | None
    stored_type: str
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int
    max_position_embeddings: int
    can_generate: bool


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    outline = checkpoint.outline
    config = checkpoint.config if checkpoint.is_known else None
    return ModelFacts(
        name=_name_of(checkpoint),
        family=outline.family,
        format=checkpoint.format,
        digest=checkpoint.digest,
        num_parameters=None if config is None else count_parameters(config),
        num_bytes=checkpoint.num_weight_bytes if checkpoint.is_known else None,
        stored_type=_stored_type(checkpoint) if checkpoint.is_known else outline.dtype,
        hidden_size=None if config is None else config.hidden_size,
        num_layers=None if config is None else config.num_layers,
        vocab_size=outline.vocab_size,
        max_position_embeddings=outline.max_position_embeddings,
        can_generate=checkpoint.can_generate,
    )


def _stored_type(checkpoint: Checkpoint) -> str:
    weights, num_bytes = checkpoint.weights, Counter[str]()
    for name in weights:
        num_bytes[weights.stored_type(name)] += weights.num_bytes(name)
    ((found, _),) = num_bytes.most_common(1)
    return found


def _name_of(checkpoint: Checkpoint) -> str:
    folder = checkpoint.folder
    is_snapshot = folder.parent.name == "snapshots"
    name = folder.parent.parent.name if is_snapshot else folder.name
    return name.removeprefix("models--").replace("--", "/") if is_snapshot else name
