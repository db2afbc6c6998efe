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
    """A model with towers beside its text model."""

    stem: str  # what its architecture begins with
    text_types: tuple[str, ...]  # the first is that of a file that says none
    aliases: tuple[str, ...] = ()  # names of the first within this model
    prefix: str = "model.language_model."  # of the text model's tensors, in place of `model.`
    may_be_flat: bool = False  # older files have the text model's settings outside
    # settings of the text model that its files do not have, and those that they leave out
    text_values: Mapping[str, object] = field(default_factory=dict[str, object])
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def architecture(self) -> str:
        return f"{self.stem}ForConditionalGeneration"


_GEMMA3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}

# by the `model_type` of the whole model
WRAPPERS: Mapping[str, Wrapper] = {
    "qwen3_5": Wrapper(stem="Qwen3_5", text_types=("qwen3_5_text",)),
    "qwen3_5_moe": Wrapper(stem="Qwen3_5Moe", text_types=("qwen3_5_moe_text",)),
    "smolvlm": Wrapper(stem="SmolVLM", text_types=("llama",), prefix="model.text_model."),
    "idefics3": Wrapper(stem="Idefics3", text_types=("llama",), prefix="model.text_model."),
    "qwen3_vl": Wrapper(stem="Qwen3VL", text_types=("qwen3",), aliases=("qwen3_vl_text",)),
    "qwen3_vl_moe": Wrapper(
        stem="Qwen3VLMoe",
        text_types=("qwen3_moe",),
        aliases=("qwen3_vl_moe_text",),
        text_values={"norm_topk_prob": True},
    ),
    "qwen2_5_vl": Wrapper(
        stem="Qwen2_5_VL",
        text_types=("qwen2",),
        aliases=("qwen2_5_vl_text", "qwen2_5_vl"),
        may_be_flat=True,
    ),
    "qwen2_vl": Wrapper(
        stem="Qwen2VL",
        text_types=("qwen2",),
        aliases=("qwen2_vl_text", "qwen2_vl"),
        may_be_flat=True,
    ),
    "lfm2_vl": Wrapper(stem="Lfm2Vl", text_types=("lfm2",)),
    "mistral3": Wrapper(stem="Mistral3", text_types=("mistral", "ministral3")),
    "gemma3": Wrapper(stem="Gemma3", text_types=("gemma3_text",), defaults=_GEMMA3_DEFAULTS),
    "gemma4": Wrapper(stem="Gemma4", text_types=("gemma4_text",)),
    "gemma4_unified": Wrapper(stem="Gemma4Unified", text_types=("gemma4_unified_text",)),
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
    whole = _type_of(raw)
    if whole is None:
        return raw
    wrapper = WRAPPERS[whole]
    inner = raw.child(TEXT_CONFIG)
    if inner is None and wrapper.may_be_flat:
        outer = {key: value for key, value in raw.values.items() if key not in _OF_TOWERS}
        inner = JsonObject(outer, raw.where)
    if inner is None:
        raise CheckpointError(
            f"{raw.where}: a model of type {whole} has {TEXT_CONFIG}, which is "
            f"absent; fetch the checkpoint again"
        )
    own_type = inner.text("model_type")
    types = *wrapper.text_types, *wrapper.aliases
    if own_type not in (None, *types):
        raise CheckpointError(
            f"{inner.where}: model_type is {shorten(own_type)}; within {whole} "
            f"supported is {' or '.join(types)}"
        )
    own = {key: value for key, value in inner.values.items() if key != "architectures"}
    values = {**wrapper.defaults, **own}
    is_own = own_type is not None and own_type not in wrapper.aliases
    values["model_type"] = own_type if is_own else wrapper.text_types[0]
    values |= wrapper.text_values
    values |= {key: raw.values[key] for key in NEWER_OUTSIDE if raw.has(key)}
    values |= {key: raw.values[key] for key in SHARED if raw.has(key) and not inner.has(key)}
    if isinstance(values.get("quantization_config"), dict):
        values["quantization_config"] = _renamed(values["quantization_config"])
    return JsonObject(values, raw.where)


def names_of_text(raw: JsonObject, towers: Sequence[NameRule]) -> Sequence[NameRule]:
    """The text model's tensors by their names without towers. `raw` are the whole model's settings,
    `towers` the names of the tensors of towers, of the one that is kept or of all."""
    return () if _type_of(raw) is None else [*towers, *_SOUND_RULES, *_TEXT_RULES]


def _type_of(raw: JsonObject) -> str | None:
    model_type, names = raw.text("model_type"), raw.items_of("architectures")
    if model_type is not None:
        return model_type if model_type in WRAPPERS else None
    return next((key for key, each in WRAPPERS.items() if each.architecture in names), None)


def outer_name(model_type: str, name: str) -> str:
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
