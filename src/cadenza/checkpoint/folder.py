"""A model folder in the Hugging Face layout: `open_checkpoint` and what it finds.

Owns which files are read and how their statements combine. Knows nothing of tokenising or of
templates beyond where they are. Invariant: a `Checkpoint` that exists has weights that fit its
config; nothing of them was read yet, and nothing of it was executed.
"""

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from cadenza.checkpoint.declaration import EMBEDDING, check_weights, declare
from cadenza.checkpoint.json_object import (
    JsonObject,
    parse_json_object,
    read_json_object,
    read_small_file,
)
from cadenza.checkpoint.model_config import ModelConfig, parse_model_config, read_token_ids
from cadenza.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer_files
from cadenza.checkpoint.weights import Weights, open_weights
from cadenza.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MAX_CONFIG_BYTES = 4 << 20

_BUNDLED = ("models", "bundled")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What generation_config.json recommends; `None` where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened folder.

    `eos_token_ids` is the union of what config.json, generation_config.json and the tokenizer say.
    `digest` changes with the config and with the weights' layout; it does not read the weights.
    """

    folder: Path
    config: ModelConfig
    weights: Weights
    generation_defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    digest: str

    @property
    def tokenizer_path(self) -> Path | None:
        """tokenizer.json, if there is one."""
        return self.tokenizer.path

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source, if there is one."""
        return self.tokenizer.chat_templates.get("default")

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the model's tensors as they are stored; a tied head counts once."""
        return sum(self.weights.entry(spec.name).num_bytes for spec in declare(self.config))


def open_checkpoint(path: Path | None) -> Checkpoint:
    """Opens a local folder; `None` is the bundled model.

    Raises:
        CheckpointError: there is no such folder, or something in it is wrong or not supported.
    """
    folder = _bundled_folder() if path is None else _local_folder(path)
    config_bytes = read_small_file(folder / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
    raw_config = parse_json_object(config_bytes, CONFIG_FILE)
    config = parse_model_config(raw_config.values)
    weights = open_weights(folder)
    check_weights(config, weights)
    if not raw_config.has("dtype") and not raw_config.has("torch_dtype"):
        config = replace(config, dtype=weights.entry(EMBEDDING).dtype)
    generation = _read_generation_config(folder)
    tokenizer = read_tokenizer_files(folder)
    return Checkpoint(
        folder=folder,
        config=config,
        weights=weights,
        generation_defaults=_parse_generation_defaults(generation),
        eos_token_ids=_unite_eos(config, generation, tokenizer),
        tokenizer=tokenizer,
        digest=hashlib.sha256(config_bytes + weights.digest().encode()).hexdigest(),
    )


def _bundled_folder() -> Path:
    folder = Path(str(resources.files("cadenza").joinpath(*_BUNDLED)))
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            "this installation has no bundled model; name a local model folder instead"
        )
    return folder


def _local_folder(path: Path) -> Path:
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"the model folder {str(path)!r} {found}; only local folders with config.json and "
            f"safetensors weights are read for now (a hub id is not): download it and name its "
            f"folder"
        )
    if not (path / CONFIG_FILE).exists():
        raise CheckpointError(
            f"the folder {str(path)!r} has no {CONFIG_FILE}; name a folder in the Hugging Face "
            f"layout"
        )
    return path


def _read_generation_config(folder: Path) -> JsonObject:
    path = folder / GENERATION_FILE
    return read_json_object(path) if path.exists() else JsonObject({}, GENERATION_FILE)


def _parse_generation_defaults(raw: JsonObject) -> GenerationDefaults:
    """Bounds are those of a request; `do_sample: false` means greedy whatever else is said."""
    temperature = raw.number("temperature", 0.0, 100.0) if raw.has("temperature") else None
    if raw.has("do_sample") and not raw.flag("do_sample", True):
        temperature = 0.0
    return GenerationDefaults(
        temperature=temperature,
        top_k=raw.whole("top_k", -1, 1 << 31) if raw.has("top_k") else None,
        top_p=raw.number("top_p", 1e-6, 1.0) if raw.has("top_p") else None,
        min_p=raw.number("min_p", 0.0, 1.0) if raw.has("min_p") else None,
        repetition_penalty=_optional_penalty(raw),
        max_new_tokens=raw.whole("max_new_tokens", 1, 1 << 31)
        if raw.has("max_new_tokens")
        else None,
    )


def _optional_penalty(raw: JsonObject) -> float | None:
    key = "repetition_penalty"
    return raw.number(key, 1e-3, 1e3) if raw.has(key) else None


def _unite_eos(
    config: ModelConfig, generation: JsonObject, tokenizer: TokenizerFiles
) -> tuple[int, ...]:
    vocab_size = config.vocab_size
    found = set(config.eos_token_ids)
    found.update(read_token_ids(generation, "eos_token_id", vocab_size))
    if tokenizer.eos_token_id is not None:
        claim = JsonObject({"eos_token": tokenizer.eos_token_id}, "the tokenizer")
        found.update(read_token_ids(claim, "eos_token", vocab_size))
    return tuple(sorted(found))
