"""The tasks, their shares of the tokens, and a stream of examples of all tasks."""

import random
from collections.abc import Callable

from training.corpus.answers import json_answers
from training.corpus.arithmetic import arithmetic
from training.corpus.dialogues import dialogues
from training.corpus.example import Example, Source, Split
from training.corpus.facts import capitals, facts
from training.corpus.lookup import lookup
from training.corpus.stories import stories
from training.corpus.tools import tools

SHARES: dict[str, float] = {
    "capitals": 0.13,
    "facts": 0.11,
    "arithmetic": 0.22,
    "stories": 0.12,
    "dialogues": 0.10,
    "json": 0.10,
    "tools": 0.13,
    "lookup": 0.12,
}
LONG_SHARES = SHARES | {"lookup": 1.5}


def make_example(task: str, source: Source, *, max_tokens: int) -> Example:
    """One example of a task; only look-ups grow with `max_tokens`."""
    makers: dict[str, Callable[[Source], Example]] = {
        "capitals": capitals,
        "facts": facts,
        "arithmetic": arithmetic,
        "stories": stories,
        "dialogues": dialogues,
        "json": json_answers,
        "tools": tools,
        "lookup": lambda source: lookup(source, max_tokens),
    }
    return makers[task](source)


def open_source(split: Split, *key: object) -> Source:
    """A random source that depends only on the split and the key."""
    return Source(random.Random(repr((split.value, *key))), split)
