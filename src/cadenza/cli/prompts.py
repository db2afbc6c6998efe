"""The model and the prompts of a command: positional words, `--model`, stdin and prompt files.

Owns the rule that tells a model from prompts, and the formats of prompt files. Invariant: a word is
the model only when it is the first one, `--model` is not given, and it is a folder with a
config.json, a GGUF file or a folder with one, or a model of the package; a first word that only
looks like a model is refused.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TextIO, cast

from cadenza.config import PACKAGED_MODELS
from cadenza.errors import ConfigError, InvalidRequestError

PromptsFormat = Literal["text", "jsonl"]
Prompt = str | tuple[int, ...]

_PATH_LIKE = re.compile(r"(\.{1,2}|~)?/\S*|\.{1,2}|~")
_HUB_ID_LIKE = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_GGUF_LIKE = re.compile(r"\S+\.gguf", re.IGNORECASE)
_JSON_KEYS = ("prompt", "prompt_token_ids")


def read_words(words: Sequence[str], model: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Tells the model's folder or file (None: the bundled model) from the prompts among `words`.

    Raises:
        ConfigError: the first word looks like a model and is none.
    """
    if model is not None or not words:
        return model, tuple(words)
    first = words[0]
    if is_local_model(first):
        return first, tuple(words[1:])
    if looks_like_model(first):
        raise ConfigError(
            f"{first!r} looks like a model, but is neither a folder with a config.json nor a GGUF "
            f"file; name the model's folder or file, or pass such a prompt by --prompts-file"
        )
    return None, tuple(words)


def only_model(word: str | None, model: str | None) -> str | None:
    """The model of a command without prompts. Raises ConfigError when it is named twice."""
    if word is not None and model is not None:
        raise ConfigError(f"the model is named twice, as {word!r} and by --model; leave one out")
    return model if word is None else word


def is_local_model(word: str) -> bool:
    path = Path(word)
    try:
        if path.is_file():
            return path.suffix.lower() == ".gguf"
        if (path / "config.json").is_file() or any(path.glob("*.gguf")):
            return True
    except (OSError, ValueError):  # too long for a path, or holds a NUL
        return False
    return word in PACKAGED_MODELS


def looks_like_model(word: str) -> bool:
    """Whether `word` is written like a path, a GGUF file or a hub id, or is a folder."""
    if any(like.fullmatch(word) for like in (_PATH_LIKE, _HUB_ID_LIKE, _GGUF_LIKE)):
        return True
    try:
        return bool(word) and Path(word).is_dir()
    except (OSError, ValueError):
        return False


def read_prompts_file(name: str, format: PromptsFormat | None) -> list[Prompt]:
    """The prompts of a file, or of stdin as `-`: one a line, without blank lines.

    Args:
        format: None decides by the ending of the name (.jsonl, .ndjson).

    Raises:
        ConfigError: the file cannot be read, or has no prompt.
        InvalidRequestError: a line is not a prompt.
    """
    by_name = "jsonl" if name.endswith((".jsonl", ".ndjson")) else "text"
    try:
        if name == "-":
            lines = _read_lines(sys.stdin)
        else:
            with Path(name).open(encoding="utf-8-sig") as file:
                lines = _read_lines(file)
    except OSError as error:
        raise ConfigError(f"--prompts-file {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts-file {name!r} is not UTF-8; convert it") from error
    if not lines:
        raise ConfigError(f"--prompts-file {name!r} has no prompts; write one a line")
    if (format or by_name) == "text":
        return [line for _, line in lines]
    return [parse_json_prompt(line, f"{name}, line {number}") for number, line in lines]


def read_piped_prompt(file: TextIO) -> str | None:
    """All of stdin as one prompt, without the line end that `echo` adds; None when it is blank.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        text = file.read().rstrip("\r\n")
        text.encode()  # in the C locale Python reads bytes that are not UTF-8 as lone surrogates
    except UnicodeError as error:
        raise ConfigError("the prompt on stdin is not UTF-8; convert it") from error
    return text if text.strip() else None


def parse_json_prompt(line: str, where: str) -> Prompt:
    """A prompt from JSON: a string, a list of token ids, or an object with one of the two.

    Raises:
        InvalidRequestError: it is something else; the message names `where`.
    """
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not valid JSON", param="prompt") from error
    if isinstance(value, dict):
        value = _only_value(cast(dict[str, object], value), where)
    if isinstance(value, str):
        return value
    ids = cast(list[object], value) if isinstance(value, list) else []
    token_ids = tuple(each for each in ids if isinstance(each, int) and not isinstance(each, bool))
    if not token_ids or len(token_ids) != len(ids):
        raise InvalidRequestError(
            f'{where}: a prompt is a string or a list of token ids, or {{"prompt": …}} with one',
            param="prompt",
        )
    return token_ids


def _only_value(found: dict[str, object], where: str) -> object:
    if len(found) != 1 or next(iter(found)) not in _JSON_KEYS:
        keys = ", ".join(map(repr, found)) or "no keys"
        raise InvalidRequestError(
            f"{where}: has {keys}; a line's object has just one of {', '.join(_JSON_KEYS)}",
            param="prompt",
        )
    return next(iter(found.values()))


def _read_lines(file: TextIO | Iterable[str]) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    numbered = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1))
    return [(number, line) for number, line in numbered if line.strip()]
