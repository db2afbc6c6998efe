"""Which of a command's words are models. `--model` decides; a command that needs a model takes its
first word. Among prompts the first word is one if it is a folder, a GGUF file or a model of the
package, or if another prompt follows and it has the form `owner/name[:tag]` or `name:tag`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from cadenza.config import PACKAGED_MODELS
from cadenza.errors import ConfigError, show

_PATH_LIKE = re.compile(r"(\.{1,2}|~)?/\S*|\.{1,2}|~")
_GGUF_LIKE = re.compile(r"\S+\.gguf", re.IGNORECASE)
_GGUF_MAGIC = b"GGUF"
_NAME_LIKE = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|[\w.-]+:[\w.-]+")


def model_and_prompts(
    words: Sequence[str], model: str | None, *, has_more: bool = False
) -> tuple[str | None, tuple[str, ...]]:
    """Tells the model (None: the bundled one) from the prompts among `words`; `has_more`: prompts
    come from elsewhere, too. Raises ConfigError where the first word is written like a path or a
    GGUF file, and is not there."""
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
    """Whether the first of prompts, which `words` are otherwise, is a model."""
    if not words:
        return False
    is_followed = len(words) > 1 or has_more
    return is_local_model(words[0]) or (is_followed and has_model_form(words[0]))


def only_model(word: str | None, model: str | None) -> str | None:
    """The model of a command that takes no other word. Raises ConfigError when it is named
    twice."""
    if word is not None and model is not None:
        raise ConfigError(f"the model is named twice, as {word!r} and by --model; leave one out")
    return model if word is None else word


def several_models(words: Sequence[str] | None, model: str | None) -> tuple[str | None, ...]:
    """The models of a command that takes several; None is the bundled model. Raises ConfigError
    where models are named in both ways."""
    if words and model is not None:
        raise ConfigError(
            f"the model is named twice, as {words[0]!r} and by --model; leave one out (several "
            f"models are words without --model)"
        )
    return tuple(words) if words else (model,)


def first_model(words: Sequence[str], model: str | None) -> tuple[str, tuple[str, ...]]:
    """The model of a command that needs one, and the words after it. Raises ConfigError when no
    word is left for the model, or it has blanks and is no path."""
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
    """The model of a command that makes a folder of it, and the folder. Raises ConfigError."""
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
    """Whether it is written as the hub's and Ollama's names are."""
    return _NAME_LIKE.fullmatch(word) is not None
