"""Text models within models of several types of input: `unwrap_config` and `names_of_text`. The
settings are nested in `text_config`, and tensors lie below `model.language_model` (in older files
`language_model.model`), beside those of towers, which keep their names or are not opened. The
result is as a checkpoint of the text model alone would have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.weights import NameRule, by_rules

TEXT_CONFIG = "text_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A model with towers beside its text model, by its names in config.json; `prefix` is what the
    names of the text model's tensors begin with, in place of `model.`. `defaults` are settings of
    the text model that files leave out."""

    model_type: str
    architecture: str
    text_type: str
    other_text_types: tuple[str, ...] = ()
    prefix: str = "model.language_model."
    text_aliases: tuple[str, ...] = ()  # names of `text_type` within this model
    may_be_flat: bool = False  # older files have the text model's settings outside
    # settings of the text model that its files do not have
    text_values: Mapping[str, object] = field(default_factory=dict[str, object])
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])


WRAPPERS: Mapping[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper(
            model_type="qwen3_5",
            architecture="Qwen3_5ForConditionalGeneration",
            text_type="qwen3_5_text",
        ),
        Wrapper(
            model_type="qwen3_5_moe",
            architecture="Qwen3_5MoeForConditionalGeneration",
            text_type="qwen3_5_moe_text",
        ),
        Wrapper(
            model_type="smolvlm",
            architecture="SmolVLMForConditionalGeneration",
            text_type="llama",
            prefix="model.text_model.",
        ),
        Wrapper(
            model_type="idefics3",
            architecture="Idefics3ForConditionalGeneration",
            text_type="llama",
            prefix="model.text_model.",
        ),
        Wrapper(
            model_type="qwen3_vl",
            architecture="Qwen3VLForConditionalGeneration",
            text_type="qwen3",
            text_aliases=("qwen3_vl_text",),
        ),
        Wrapper(
            model_type="qwen3_vl_moe",
            architecture="Qwen3VLMoeForConditionalGeneration",
            text_type="qwen3_moe",
            text_aliases=("qwen3_vl_moe_text",),
            text_values={"norm_topk_prob": True},
        ),
        Wrapper(
            model_type="qwen2_5_vl",
            architecture="Qwen2_5_VLForConditionalGeneration",
            text_type="qwen2",
            text_aliases=("qwen2_5_vl_text", "qwen2_5_vl"),
            may_be_flat=True,
        ),
        Wrapper(
            model_type="qwen2_vl",
            architecture="Qwen2VLForConditionalGeneration",
            text_type="qwen2",
            text_aliases=("qwen2_vl_text", "qwen2_vl"),
            may_be_flat=True,
        ),
        Wrapper(
            model_type="lfm2_vl",
            architecture="Lfm2VlForConditionalGeneration",
            text_type="lfm2",
        ),
        Wrapper(
            model_type="mistral3",
            architecture="Mistral3ForConditionalGeneration",
            text_type="mistral",
            other_text_types=("ministral3",),
        ),
        Wrapper(
            model_type="gemma3",
            architecture="Gemma3ForConditionalGeneration",
            text_type="gemma3_text",
            defaults={
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "rms_norm_eps": 1e-6,
            },
        ),
        Wrapper(
            model_type="gemma4",
            architecture="Gemma4ForConditionalGeneration",
            text_type="gemma4_text",
        ),
        Wrapper(
            model_type="gemma4_unified",
            architecture="Gemma4UnifiedForConditionalGeneration",
            text_type="gemma4_unified_text",
        ),
    )
}

# settings that the whole model's head follows, whatever the text model's say
NEWER_OUTSIDE = ("tie_word_embeddings",)

# settings that may be outside only
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")

# settings of a flat file that are no part of its text model
_OF_TOWERS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)

_TEXT_RULES: tuple[NameRule, ...] = (
    ("model.language_model.*", "model.*"),
    ("model.text_model.*", "model.*"),
    ("language_model.model.*", "model.*"),
    ("language_model.lm_head.*", "lm_head.*"),
)
_text_name = by_rules(_TEXT_RULES)

_SOUND_RULES: tuple[NameRule, ...] = (
    ("model.audio_tower.*", None),
    ("audio_tower.*", None),
    ("model.embed_audio.*", None),
)


def unwrap_config(raw: JsonObject) -> JsonObject:
    """The settings of the text model, with those that it shares with the whole model; `raw` itself
    for other models. Raises CheckpointError if the text model is of another type than it should."""
    wrapper = _wrapper_of(raw)
    if wrapper is None:
        return raw
    inner = raw.child(TEXT_CONFIG)
    if inner is None and wrapper.may_be_flat:
        outer = {key: value for key, value in raw.values.items() if key not in _OF_TOWERS}
        inner = JsonObject(outer, raw.where)
    if inner is None:
        raise CheckpointError(
            f"{raw.where}: a model of type {wrapper.model_type} has {TEXT_CONFIG}, which is "
            f"absent; fetch the checkpoint again"
        )
    own_type = inner.text("model_type")
    types = wrapper.text_type, *wrapper.other_text_types, *wrapper.text_aliases
    if own_type not in (None, *types):
        raise CheckpointError(
            f"{inner.where}: model_type is {shorten(own_type)}; within {wrapper.model_type} "
            f"supported is {' or '.join(types)}"
        )
    own = {key: value for key, value in inner.values.items() if key != "architectures"}
    values = {**wrapper.defaults, **own}
    is_own = own_type is not None and own_type not in wrapper.text_aliases
    values["model_type"] = own_type if is_own else wrapper.text_type
    values |= wrapper.text_values
    values |= {key: raw.values[key] for key in NEWER_OUTSIDE if raw.has(key)}
    values |= {key: raw.values[key] for key in SHARED if raw.has(key) and not inner.has(key)}
    if isinstance(values.get("quantization_config"), dict):
        values["quantization_config"] = _renamed(values["quantization_config"])
    return JsonObject(values, raw.where)


def names_of_text(raw: JsonObject, towers: Sequence[NameRule]) -> Sequence[NameRule]:
    """The text model's tensors by their names without towers. `raw` are the whole model's settings,
    `towers` the names of the tensors of towers, of the one that is kept or of all."""
    return () if _wrapper_of(raw) is None else [*towers, *_SOUND_RULES, *_TEXT_RULES]


def _wrapper_of(raw: JsonObject) -> Wrapper | None:
    names = raw.items_of("architectures")
    model_type = raw.text("model_type")
    for wrapper in WRAPPERS.values():
        if model_type == wrapper.model_type or (
            model_type is None and wrapper.architecture in names
        ):
            return wrapper
    return None


def outer_name(model_type: str, name: str) -> str:
    """The name of a text model's tensor within a whole model."""
    inner = "model."
    return (
        WRAPPERS[model_type].prefix + name.removeprefix(inner) if name.startswith(inner) else name
    )


def _renamed(value: Any) -> Any:
    """Settings of quantised weights, with the names of modules that they list."""
    if isinstance(value, str):
        return _text_name(value)
    if isinstance(value, list):
        return [_renamed(each) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value).items()
        return {_text_name(key): _renamed(each) for key, each in entries}
    return value
