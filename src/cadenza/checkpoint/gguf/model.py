"""Opens the model of a GGUF file: `open_gguf_model`. Owns what the metadata say beyond the model's
shape: special tokens, chat templates, recommended sampling. Opening reads headers only; the
tokenizer is made when it is first needed."""

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

from cadenza.checkpoint.folder import Checkpoint, unite_eos, vision_settings
from cadenza.checkpoint.generation_defaults import (
    ASSUMED_OF_GGUF,
    DefaultPooling,
    GenerationDefaults,
    parse_generation_defaults,
    with_assumed,
)
from cadenza.checkpoint.gguf.config import read_config, with_absent_keys
from cadenza.checkpoint.gguf.files import open_gguf_files
from cadenza.checkpoint.gguf.mmproj import find_projector, open_projector
from cadenza.checkpoint.gguf.reader import GGUFFile
from cadenza.checkpoint.gguf.settings import Settings
from cadenza.checkpoint.gguf.tensors import map_tensors
from cadenza.checkpoint.gguf.tokenizer import Vocabulary, read_gguf_tokenizer, read_vocabulary
from cadenza.checkpoint.tokenizer_files import (
    MAX_TEMPLATES,
    TOKENIZER_FILE,
    TokenizerFiles,
    check_templates,
    read_tokenizer_files,
)
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.config_json import outline_of
from cadenza.models.model_config import ModelConfig
from cadenza.models.towers.reader import VisionOptions
from cadenza.request import Pooling
from cadenza.text.tokens.tokenizer import TokenizerSource
from cadenza.weights.weights import Weights

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the key's own spelling
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# control tokens that end an answer: many files name only one of theirs
_END_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn> </s> "
    "<eos> <turn|> <|tool_response>".split()
)
# of the harmony format, in which `<|end|>` ends a message, and others follow it
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>", "<|endoftext|>"))

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# by `pooling_type`: none, mean, cls, last, rank
_POOLINGS: tuple[Pooling | None, ...] = ("last", "mean", None, "last", None)

# recommended settings that are not applied, with their neutral values
_UNAPPLIED = {"xtc_probability": 0, "mirostat": 0}


def open_gguf_model(
    path: Path,
    *,
    revision: str | None = None,
    beside: Path | None = None,
    vision: VisionOptions | None = None,
) -> Checkpoint:
    """Opens a file, with the others of its model if there are several. The tokenizer.json of the
    folder `beside`, with its settings, replaces the metadata's. `vision` is what is asked for of
    the model's images; None is `VisionOptions()`. Raises CheckpointError if a file is invalid, or
    the model is not supported."""
    files = open_gguf_files(path)
    settings = Settings(files=files)
    config, weights = read_model(files)
    vocabulary = read_vocabulary(settings.metadata)
    if vocabulary is not None and len(vocabulary.tokens) > config.vocab_size:
        raise CheckpointError(
            f"{path.name} has {len(vocabulary.tokens)} tokens, but its embedding has "
            f"{config.vocab_size} rows; convert the model again"
        )
    config = replace(config, bos_token_id=vocabulary and vocabulary.token_id("bos_token_id"))
    tokens = [] if vocabulary is None else vocabulary.tokens
    config, weights = _with_tower(path, (config, weights), tokens, vision or VisionOptions())
    outline = outline_of(config)
    end_ids = () if vocabulary is None else _end_ids(vocabulary)
    defaults = _read_defaults(settings.metadata)
    tokenizer = _read_tokenizer(vocabulary, settings.metadata)
    if beside is not None and (beside / TOKENIZER_FILE).exists():
        tokenizer = read_tokenizer_files(beside)
        united = unite_eos(outline, JsonObject({}, path.name), tokenizer)
        end_ids = tuple(sorted({*end_ids, *united}))
    return Checkpoint(
        folder=path.parent,
        format="gguf",
        outline=outline,
        generation_defaults=defaults,
        eos_token_ids=end_ids,
        tokenizer=tokenizer,
        digest=hashlib.sha256(
            weights.digest().encode() + vision_settings((config, weights))
        ).hexdigest(),
        revision=revision,
        known=(config, weights),
        pooling=_default_pooling(settings),
    )


def read_model(files: tuple[GGUFFile, ...]) -> tuple[ModelConfig, Weights]:
    """The config and the declared tensors of a model's files. Raises CheckpointError."""
    settings = Settings(files=files)
    try:
        config, architecture = read_config(settings)
        return config, map_tensors(config, architecture, files)
    except CheckpointError as error:
        raise with_absent_keys(error, settings) from error


def _with_tower(
    path: Path, text: tuple[ModelConfig, Weights], tokens: list[str], options: VisionOptions
) -> tuple[ModelConfig, Weights]:
    config, weights = text
    file = find_projector(path, config, options)
    if file is None:
        return text
    vision, tensors = open_projector(file, config, tokens, options)
    weights = replace(
        weights, files=(*weights.files, file.mapped), tensors={**weights.tensors, **tensors}
    )
    return replace(config, vision=vision), weights


def _read_defaults(metadata: JsonObject) -> GenerationDefaults:
    prefix = "general.sampling."
    values = {name: metadata.get(f"{prefix}{key}") for name, key in _SAMPLING.items()}
    defaults = parse_generation_defaults(JsonObject(values, metadata.where))
    unapplied = [
        f"{prefix}{key}"
        for key, neutral in _UNAPPLIED.items()
        if metadata.get(f"{prefix}{key}") not in (None, neutral)
    ]
    return replace(with_assumed(defaults, ASSUMED_OF_GGUF), unapplied=tuple(unapplied))


def _default_pooling(settings: Settings) -> DefaultPooling:
    try:
        kind = settings.integer("pooling_type", 0, len(_POOLINGS) - 1, default=0)
    except CheckpointError as error:  # generation does not need it
        return DefaultPooling(pooling=None, reason=str(error))
    pooling = _POOLINGS[kind]
    reason = "" if pooling else f"the file has pooling_type {kind}, which is not built"
    return DefaultPooling(pooling=pooling, reason=reason)


def _end_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    named = {vocabulary.token_id(name) for name in _END_IDS} - {None}
    texts = _HARMONY_ENDS if "<|channel|>" in vocabulary.tokens else _END_TEXTS
    known = {
        token_id
        for token_id, text in enumerate(vocabulary.tokens)
        if text in texts and vocabulary.is_control(token_id)
    }
    ends = {token_id for token_id in named | known if token_id is not None}
    if texts is _HARMONY_ENDS:
        ends = {token_id for token_id in ends if vocabulary.tokens[token_id] != "<|end|>"}
    return tuple(sorted(ends))


def _read_tokenizer(vocabulary: Vocabulary | None, metadata: JsonObject) -> TokenizerFiles:
    templates = _read_templates(metadata)
    if vocabulary is None:
        return TokenizerFiles(source=None, chat_templates=templates)
    ids = {name: vocabulary.token_id(key) for name, key in _SPECIAL_IDS.items()}
    read = functools.partial(read_gguf_tokenizer, vocabulary)
    return TokenizerFiles(
        source=TokenizerSource(name=metadata.where, read=read),
        special_tokens={
            name: vocabulary.tokens[token_id]
            for name, token_id in ids.items()
            if token_id is not None
        },
        chat_templates=templates,
        eos_token_id=ids["eos_token"],
    )


def _read_templates(metadata: JsonObject) -> dict[str, str]:
    """The default template, and those whose names follow its key."""
    keys = [key for key in metadata.values if key.startswith(f"{_TEMPLATE}.")][:MAX_TEMPLATES]
    found = {key.removeprefix(f"{_TEMPLATE}."): metadata.text(key) for key in keys}
    found["default"] = metadata.text(_TEMPLATE)
    templates = {name: source for name, source in found.items() if source is not None}
    check_templates(templates)
    return templates
