"""What requests that say nothing get: `GenerationDefaults`, recommended sampling by
generation_config.json, and `DefaultPooling`, of embeddings, by sentence-transformers files. A key
that would change sampling is a field here or named in `unapplied`; no file of pooling keeps a model
from being opened."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cadenza.bounds import NumberBound
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, read_json_object, read_small_file, shorten
from cadenza.request import PARAMETERS, Pooling

GENERATION_FILE = "generation_config.json"

# of the keys that recommend a sampling parameter: a request could have each of the values
_BOUNDS = {
    each.recommended: each.within
    for each in PARAMETERS.values()
    if each.recommended is not None and isinstance(each.within, NumberBound)
}

# unsupported keys, with their neutral values
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "assistant_early_exit": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": ({},),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The recommended sampling settings; None for those that the file does not set. `unapplied`
    lists the unsupported keys with other than neutral values; `assumed` lists the fields that
    `with_assumed` has set. It is not in the `repr`, from which the fingerprint of answers is made,
    because it changes no answer."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None
    unapplied: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=(), repr=False)


# What llama.cpp samples with where a GGUF file recommends nothing. Small and coarsely quantised
# models give few right answers at temperature 1 without cuts
ASSUMED_OF_GGUF: Mapping[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}


def with_assumed(stated: GenerationDefaults, assumed: Mapping[str, float]) -> GenerationDefaults:
    missing = {name: value for name, value in assumed.items() if getattr(stated, name) is None}
    return replace(stated, **missing, assumed=tuple(missing))


def read_generation_config(folder: Path) -> JsonObject:
    """Empty if the folder has none. Raises CheckpointError."""
    path = folder / GENERATION_FILE
    return read_json_object(path) if path.exists() else JsonObject({}, GENERATION_FILE)


def parse_generation_defaults(raw: JsonObject) -> GenerationDefaults:
    """The typed settings of a generation_config.json; `do_sample: false` means temperature 0.
    Raises CheckpointError if a value has the wrong type or is out of bounds."""
    found = {key: _recommended(raw, key, bound) for key, bound in _BOUNDS.items()}
    if raw.has("do_sample") and not raw.flag("do_sample", True):
        found["temperature"] = 0.0
    return GenerationDefaults(
        **found,
        unapplied=tuple(
            key for key in _NEUTRAL if raw.has(key) and raw.get(key) not in _NEUTRAL[key]
        ),
    )


def _recommended(raw: JsonObject, key: str, bound: NumberBound) -> Any:
    if not raw.has(key):
        return None
    if not bound.is_integer:
        return raw.number(key, bound.low, bound.high)
    least = 1 if key == "max_new_tokens" else int(bound.low)
    return raw.integer(key, least, int(bound.high))


MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
MAX_MODULES_BYTES = 1 << 16

_MODES: dict[str, Pooling | None] = {
    "pooling_mode_cls_token": None,
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": None,
}
_NAMED_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_MEAN = "pooling_mode_mean_tokens"
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPooling:
    """The pooling of requests that name none; None, because of `reason`, if they must name one."""

    pooling: Pooling | None = "last"
    reason: str = ""


def read_default_pooling(folder: Path) -> DefaultPooling:
    """None of a folder without such files."""
    try:
        return _read(folder)
    except CheckpointError as error:  # generation needs none of them
        return DefaultPooling(pooling=None, reason=str(error))


def _read(folder: Path) -> DefaultPooling:
    odd = _odd_module(folder / MODULES_FILE)
    if odd is not None:
        reason = f"{MODULES_FILE} has the module {shorten(odd)}, which is not built"
        return DefaultPooling(pooling=None, reason=reason)
    path = folder / POOLING_FILE
    return _pooling_of(read_json_object(path)) if path.exists() else DefaultPooling()


def _pooling_of(config: JsonObject) -> DefaultPooling:
    named = config.text("pooling_mode")
    if named is not None:
        modes = [named]
        pooling = _NAMED_MODES.get(named)
    else:
        modes = [mode for mode in _MODES if config.flag(mode, mode == _MEAN)]
        pooling = _MODES[modes[0]] if len(modes) == 1 else None
    if pooling is not None:
        return DefaultPooling(pooling=pooling)
    shown = " and ".join(map(shorten, modes)) or "no pooling"
    return DefaultPooling(
        pooling=None, reason=f"{POOLING_FILE} asks for {shown}, which is not built"
    )


def _odd_module(path: Path) -> str | None:
    """The type of a module that changes embeddings in another way than pooling does."""
    if not path.exists():
        return None
    try:
        modules: object = json.loads(read_small_file(path, max_bytes=MAX_MODULES_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON; fetch the file again") from error
    listed = cast(list[object], modules) if isinstance(modules, list) else [modules]
    for module in listed:
        known = cast(dict[str, object], module) if isinstance(module, dict) else {}
        kind = known.get("type")
        if not isinstance(kind, str):
            shown = shorten(cast(object, module))
            raise CheckpointError(f"{path.name} holds {shown}; it must list modules")
        if kind.rpartition(".")[2] not in _MODULES:
            return kind
    return None
