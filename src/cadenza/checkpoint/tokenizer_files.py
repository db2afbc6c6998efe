"""Reads a folder's tokenizer settings: special tokens and chat templates. Encodes no text and
renders no templates. Files beyond their size limit are refused, not read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.errors import CheckpointError, ConfigError, show, show_size
from cadenza.json_object import (
    JsonObject,
    read_json_object,
    read_small_file,
    regular_file_size,
    shorten,
)
from cadenza.text.tokens.tokenizer import MAX_TOKENIZER_BYTES, TokenizerSource

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
OLD_TEMPLATE_FILE = "chat_template.json"
_TEMPLATE_MARKS = ("{{", "{%")  # without either Jinja writes the same text for all messages

MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEMPLATES = 64

# tokens after which another than the model continues, by what a chat template has of the family:
# many copies of a checkpoint name only one of them
_TEMPLATE_ENDS = (
    ("<|channel|>", ("<|return|>", "<|call|>")),
    ("<|tool_call>", ("<turn|>", "<|tool_response>")),
)

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A checkpoint's tokenizer settings. `source` is tokenizer.json's path, or its content made of
    other data, None if there is none. `special_tokens` maps names such as bos_token to their text,
    `chat_templates` names such as "default" to Jinja source. `end_token_ids` are those that a chat
    template shows to end answers."""

    source: Path | TokenizerSource | None
    special_tokens: dict[str, str] = field(default_factory=dict[str, str])
    chat_templates: dict[str, str] = field(default_factory=dict[str, str])
    eos_token_id: int | None = None
    end_token_ids: tuple[int, ...] = ()


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Every file is optional. Raises CheckpointError if one is malformed or too large."""
    path = folder / TOKENIZER_FILE
    if path.exists() and regular_file_size(path) > MAX_TOKENIZER_BYTES:
        raise CheckpointError(
            f"{TOKENIZER_FILE} has over {show_size(MAX_TOKENIZER_BYTES)}; check that it is "
            f"the right file"
        )
    config = _read_optional(folder / TOKENIZER_CONFIG_FILE)
    special_tokens = _read_special_tokens(_read_optional(folder / SPECIAL_TOKENS_FILE))
    special_tokens |= _read_special_tokens(config)
    templates = _read_templates(folder, config)
    eos = special_tokens.get("eos_token")
    ends = _ends_shown_by(templates.get("default", ""))
    ids = _find_token_ids([*ends, *([] if eos is None else [eos])], config, path)
    return TokenizerFiles(
        source=path if path.exists() else None,
        special_tokens=special_tokens,
        chat_templates=templates,
        eos_token_id=None if eos is None else ids.get(eos),
        end_token_ids=tuple(sorted({ids[end] for end in ends if end in ids})),
    )


def _ends_shown_by(template: str) -> Sequence[str]:
    return next((ends for mark, ends in _TEMPLATE_ENDS if mark in template), ())


def _read_optional(path: Path) -> JsonObject:
    if not path.exists():
        return JsonObject({}, path.name)
    return read_json_object(path, max_bytes=MAX_TOKENIZER_CONFIG_BYTES)


def _read_special_tokens(raw: JsonObject) -> dict[str, str]:
    """Each is a string or an object with its `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = raw.get(name)
        content = raw.child(name) if isinstance(value, dict) else None
        text = content.text("content") if content is not None else raw.text(name)
        if text is not None:
            found[name] = text
    return found


def _read_templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """By name; files of their own override those in tokenizer_config.json."""
    found = _read_config_templates(config)
    if (folder / OLD_TEMPLATE_FILE).exists():
        found |= _read_config_templates(_read_optional(folder / OLD_TEMPLATE_FILE))
    if (folder / TEMPLATE_FILE).exists():
        found["default"] = _read_template(folder / TEMPLATE_FILE)
    named = folder / NAMED_TEMPLATES_FOLDER
    for path in sorted(named.glob("*.jinja"))[:MAX_TEMPLATES] if named.is_dir() else ():
        found[path.stem] = _read_template(path)
    check_templates(found)
    return found


def check_templates(templates: Mapping[str, str]) -> None:
    """Raises CheckpointError if a template is too long."""
    for name, source in templates.items():
        if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"the chat template {shorten(name)} has over {show_size(MAX_TEMPLATE_BYTES)}; "
                f"shorten it"
            )


def given_template(text: str) -> str:
    """The Jinja source of a template that a user names: its file, or else the text of one. Raises
    CheckpointError if the file cannot be read or is no template, ConfigError if there is no such
    file and the text is no template."""
    is_file = os.path.isfile(text)
    source = _read_template(Path(text)) if is_file else text
    if not any(mark in source for mark in _TEMPLATE_MARKS):
        marks = " or ".join(_TEMPLATE_MARKS)
        if is_file:
            raise CheckpointError(
                f"{Path(text).name} writes no message, since it has no {marks}; check that it is a "
                f"chat template"
            )
        raise ConfigError(
            f"--chat-template {show(text)}: there is no such file, and it is not the text of a "
            f"template, which has {marks}; name a file"
        )
    check_templates({"--chat-template": source})
    return source


def _read_template(path: Path) -> str:
    data = read_small_file(path, max_bytes=MAX_TEMPLATE_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8; fetch the file again") from error


def _read_config_templates(config: JsonObject) -> dict[str, str]:
    key = "chat_template"
    if not isinstance(config.get(key), list):
        source = config.text(key)
        return {} if source is None else {"default": source}
    found: dict[str, str] = {}
    for entry in config.items_of(key)[:MAX_TEMPLATES]:
        raw = JsonObject({"entry": entry}, f"{config.where}: {key}").child("entry")
        name = raw.text("name") if raw is not None else None
        source = raw.text("template") if raw is not None else None
        if name is None or source is None:
            raise config.wrong(key, "a string or a list of objects with name and template")
        found[name] = source
    return found


def _find_token_ids(contents: Sequence[str], config: JsonObject, tokenizer: Path) -> dict[str, int]:
    """From tokenizer_config.json, or else tokenizer.json."""
    found: dict[str, int] = {}
    decoder = config.child("added_tokens_decoder")
    for key in decoder.values if decoder is not None else ():
        if found.keys() >= {*contents}:
            return found
        entry = decoder.child(key) if decoder is not None else None
        content = None if entry is None else entry.text("content")
        if content is not None and content in contents and key.isdecimal():
            found.setdefault(content, int(key[:20]))
    if found.keys() >= {*contents} or not tokenizer.exists():
        return found
    raw = read_json_object(tokenizer, max_bytes=MAX_TOKENIZER_BYTES)
    return {**_ids_of_file(contents, raw), **found}


def _ids_of_file(contents: Sequence[str], raw: JsonObject) -> dict[str, int]:
    """Of its added tokens, or else of its vocabulary."""
    found: dict[str, int] = {}
    for entry in raw.items_of("added_tokens"):
        token = JsonObject({"token": entry}, f"{TOKENIZER_FILE}: added_tokens").child("token")
        content = None if token is None else token.text("content")
        if token is not None and content is not None and content in contents:
            found.setdefault(content, token.integer("id", 0, 1 << 31))
    model = raw.child("model")
    if model is None or not isinstance(model.get("vocab"), dict):
        return found
    vocab = model.child("vocab")
    for content in contents:
        if vocab is not None and content not in found and content in vocab.values:
            found[content] = vocab.integer(content, 0, 1 << 31)
    return found
