"""`ModelOutline`: what the engine needs to know of a model whose arithmetic the backend brings,
read from a config.json without its family. Every `ModelConfig` has an outline; a model may have an
outline and no `ModelConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass

from cadenza.json_object import JsonObject
from cadenza.models.config_json import CONFIG_FILE, read_dtype, read_token_ids
from cadenza.models.model_config import MAX_VOCAB_SIZE, ModelConfig
from cadenza.models.rope_config import MAX_POSITIONS
from cadenza.weights.dtypes import WeightDType

DEFAULT_POSITIONS = 1 << 20  # of models that state none, such as purely recurrent ones

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """The facts of a model beyond its arithmetic. `windows` are the attention windows of its
    layers, in tokens, as far as they are known."""

    family: str
    vocab_size: int
    max_position_embeddings: int
    dtype: WeightDType
    eos_token_ids: tuple[int, ...]
    windows: tuple[int, ...] = ()


def outline_of(config: ModelConfig) -> ModelOutline:
    return ModelOutline(
        family=config.family,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        dtype=config.dtype,
        eos_token_ids=config.eos_token_ids,
        windows=tuple(kind.window or 0 for kind in config.layer_kinds),
    )


def read_outline(values: Mapping[str, object]) -> ModelOutline:
    """The outline of a config.json's content; nested settings are those of `text_config`. Raises
    CheckpointError if a setting is missing or out of bounds."""
    raw = JsonObject(values, CONFIG_FILE)
    inner = raw.child("text_config") or raw
    sized = inner if inner.has("vocab_size") else raw
    vocab_size = sized.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    key = next((each for each in _POSITION_KEYS if inner.has(each)), _POSITION_KEYS[0])
    window = inner.integer("sliding_window", 0, MAX_POSITIONS, 0)
    stated = inner if inner.has("dtype") or inner.has("torch_dtype") else raw
    eos = inner if inner.has("eos_token_id") else raw
    return ModelOutline(
        family=raw.text("model_type") or "unnamed",
        vocab_size=vocab_size,
        max_position_embeddings=inner.integer(key, 1, MAX_POSITIONS, DEFAULT_POSITIONS),
        dtype=read_dtype(stated),
        eos_token_ids=read_token_ids(eos, "eos_token_id", vocab_size),
        windows=(window,) if window else (),
    )
