"""What generation_config.json recommends: `GenerationDefaults`, typed and bounded.

Owns that file's keys. Knows nothing of requests. Invariant: a key that would change what is
sampled is either a field here or named in `unapplied`.
"""

from dataclasses import dataclass
from pathlib import Path

from cadenza.checkpoint.json_object import JsonObject, read_json_object

GENERATION_FILE = "generation_config.json"
MAX_COUNT = 1 << 31

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
"""Keys that are not applied, with the values under which they would do nothing anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The recommended sampling; `None` where the file says nothing.

    `unapplied` names the keys that ask for something else than these fields.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None
    unapplied: tuple[str, ...] = ()


def read_generation_config(folder: Path) -> JsonObject:
    """The folder's generation_config.json; empty when there is none."""
    path = folder / GENERATION_FILE
    return read_json_object(path) if path.exists() else JsonObject({}, GENERATION_FILE)


def parse_generation_defaults(raw: JsonObject) -> GenerationDefaults:
    """`do_sample: false` means greedy, whatever else is said.

    Raises:
        CheckpointError: a value is outside the bounds that a request has for it.
    """
    temperature = _number(raw, "temperature", 0.0, 100.0)
    if raw.has("do_sample") and not raw.flag("do_sample", True):
        temperature = 0.0
    return GenerationDefaults(
        temperature=temperature,
        top_k=_whole(raw, "top_k", -1),
        top_p=_number(raw, "top_p", 1e-6, 1.0),
        min_p=_number(raw, "min_p", 0.0, 1.0),
        repetition_penalty=_number(raw, "repetition_penalty", 1e-3, 1e3),
        min_new_tokens=_whole(raw, "min_new_tokens", 0),
        max_new_tokens=_whole(raw, "max_new_tokens", 1),
        unapplied=tuple(
            key for key in _NEUTRAL if raw.has(key) and raw.get(key) not in _NEUTRAL[key]
        ),
    )


def _number(raw: JsonObject, key: str, low: float, high: float) -> float | None:
    return raw.number(key, low, high) if raw.has(key) else None


def _whole(raw: JsonObject, key: str, low: int) -> int | None:
    return raw.whole(key, low, MAX_COUNT) if raw.has(key) else None
