"""What is read from people: prompts from files and from stdin, and answers to a question.

Owns the formats of prompt files. Invariant: what is no prompt is refused with its file and line.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TextIO, cast

from cadenza.errors import ConfigError, InvalidRequestError

PromptsFormat = Literal["text", "jsonl"]
Prompt = str | tuple[int, ...]

YES_OR_NO = "Answer y or n."
_ANSWERS = {"y": True, "yes": True, "n": False, "no": False}
_JSON_KEYS = ("prompt", "prompt_token_ids")


def read_prompts_file(name: str, format: PromptsFormat | None) -> list[Prompt]:
    """The prompts of a file, or of stdin as `-`: one a line, without blank lines. `format` None
    decides by the ending of the name (.jsonl, .ndjson). Raises ConfigError where the file cannot be
    read, or has no prompt, InvalidRequestError where a line is not a prompt."""
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
    Raises ConfigError where it is not UTF-8."""
    try:
        text = file.read().rstrip("\r\n")
        text.encode()  # in the C locale Python reads bytes that are not UTF-8 as lone surrogates
    except UnicodeError as error:
        raise ConfigError("the prompt on stdin is not UTF-8; convert it") from error
    return text if text.strip() else None


def yes_or_no(answer: str, *, default: bool) -> bool | None:
    """What was answered; None where it is neither, so that the question is asked again."""
    word = answer.strip().lower()
    return _ANSWERS.get(word) if word else default


def parse_json_prompt(line: str, where: str) -> Prompt:
    """A prompt from JSON: a string, a list of token ids, or an object with one of the two. Raises
    InvalidRequestError where it is something else; the message names `where`."""
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
