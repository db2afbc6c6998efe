"""A command's words: which of them are models, which prompts; prompts from files and stdin; yes or
no. Among prompts the first word is a model if it is a folder, a GGUF file or a model of the
package, or if another prompt follows and it has the form `owner/name[:tag]` or `name:tag`."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TextIO, cast

from cadenza.config import PACKAGED_MODELS
from cadenza.errors import ConfigError, InvalidRequestError, show

_PATH_LIKE = re.compile(r"(\.{1,2}|~)?/\S*|\.{1,2}|~")
_GGUF_LIKE = re.compile(r"\S+\.gguf", re.IGNORECASE)
_GGUF_MAGIC = b"GGUF"
_NAME_LIKE = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|[\w.-]+:[\w.-]+")


def model_and_prompts(
    words: Sequence[str], model: str | None, *, has_more: bool = False
) -> tuple[str | None, tuple[str, ...]]:
    """`has_more`: prompts come from elsewhere, too. Raises ConfigError where the first word is
    written like a path or a GGUF file, and is not there."""
    if model is not None or not words:
        return model, tuple(words)
    first, *rest = words
    if begins_with_model(words, has_more=has_more):
        return first, tuple(rest)
    if _PATH_LIKE.fullmatch(first) or _GGUF_LIKE.fullmatch(first):
        raise ConfigError(
            f"{show(first)} is written like a model, and no such folder or file exists; correct "
            f"it, or, where it is a prompt, name the model by --model"
        )
    return None, tuple(words)


def begins_with_model(words: Sequence[str], *, has_more: bool = False) -> bool:
    if not words:
        return False
    is_followed = len(words) > 1 or has_more
    return is_local_model(words[0]) or (is_followed and has_model_form(words[0]))


def only_model(word: str | None, model: str | None) -> str | None:
    """Raises ConfigError when the model is named twice."""
    if word is not None and model is not None:
        raise ConfigError(f"the model is named twice, as {word!r} and by --model; leave one out")
    return model if word is None else word


def several_models(words: Sequence[str] | None, model: str | None) -> tuple[str | None, ...]:
    """None is the bundled model. Raises ConfigError where models are named in both ways."""
    if words and model is not None:
        raise ConfigError(
            f"the model is named twice, as {words[0]!r} and by --model; leave one out (several "
            f"models are words without --model)"
        )
    return tuple(words) if words else (model,)


def first_model(words: Sequence[str], model: str | None) -> tuple[str, tuple[str, ...]]:
    """And the words after it. Raises ConfigError when no word is left for the model, or it has
    blanks and is no path."""
    if model is not None:
        return model, tuple(words)
    if not words:
        raise ConfigError("there is no model; name it first, or by --model")
    first, *rest = words
    if len(first.split()) != 1 and not is_local_model(first):
        raise ConfigError(
            f"the first word is the model, and {show(first)} is none; name a model before it, such "
            f"as {PACKAGED_MODELS[0]}, or by --model"
        )
    return first, tuple(rest)


def model_and_out(words: Sequence[str], model: str | None) -> tuple[str, Path]:
    """Raises ConfigError."""
    name, rest = first_model(words, model)
    if len(rest) != 1:
        given = f"{len(words)} words" if len(words) != 1 else "one word"
        raise ConfigError(
            f"{given} and {'no' if model is None else 'a'} --model were given; give the model, and "
            f"the folder that is to be made of it"
        )
    return name, Path(rest[0])


def is_local_model(word: str) -> bool:
    """Whether it is a folder, a GGUF file or a model of the package."""
    path = Path(word)
    try:
        if path.is_file():
            return path.suffix.lower() == ".gguf" or _begins_as_gguf(path)
        is_folder = bool(word) and path.is_dir()
    except (OSError, ValueError):  # too long for a path, or holds a NUL
        return False
    return is_folder or word in PACKAGED_MODELS


def _begins_as_gguf(path: Path) -> bool:
    """Ollama keeps such files under names without a suffix."""
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def has_model_form(word: str) -> bool:
    return _NAME_LIKE.fullmatch(word) is not None


PromptsFormat = Literal["text", "jsonl"]
Prompt = str | tuple[int, ...]

YES_OR_NO = "Answer y or n."
_ANSWERS = {"y": True, "yes": True, "n": False, "no": False}
_JSON_KEYS = ("prompt", "prompt_token_ids")


def read_prompts_file(name: str, format: PromptsFormat | None) -> list[Prompt]:
    """One a line, without blank lines; `-` is stdin. `format` None: by the ending of the name
    (.jsonl, .ndjson). Raises ConfigError, InvalidRequestError."""
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
    """Without the line end that `echo` adds; None when it is blank. Raises ConfigError: no
    UTF-8."""
    try:
        text = file.read().rstrip("\r\n")
        text.encode()  # in the C locale Python reads bytes that are not UTF-8 as lone surrogates
    except UnicodeError as error:
        raise ConfigError("the prompt on stdin is not UTF-8; convert it") from error
    return text if text.strip() else None


def yes_or_no(answer: str, *, default: bool) -> bool | None:
    """None where it is neither, so that the question is asked again."""
    word = answer.strip().lower()
    return _ANSWERS.get(word) if word else default


def parse_json_prompt(line: str, where: str) -> Prompt:
    """From a string, a list of token ids, or an object with one of the two. Raises
    InvalidRequestError, which names `where`."""
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
    numbered = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1))
    return [(number, line) for number, line in numbered if line.strip()]
