"""The tasks, their shares of the tokens, and a stream of examples of all tasks."""

import random
from collections.abc import Callable

from training.corpus.answers import json_answers
from training.corpus.arithmetic import arithmetic
from training.corpus.copying import copying
from training.corpus.dialogues import dialogues, long_dialogue
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
MIXED_SHARES = SHARES | {"lookup": 0.30, "copying": 0.15, "long dialogues": 0.10}
LONG_SHARES = SHARES | {"lookup": 2.0, "copying": 0.5, "long dialogues": 0.2}
COPY_SHARES = {
    "copying": 0.55,
    "lookup": 0.25,
    "arithmetic": 0.05,
    "long dialogues": 0.03,
    "json": 0.03,
    "tools": 0.03,
    "facts": 0.02,
    "capitals": 0.02,
    "stories": 0.02,
}
"""Shares of the copying phase; the other tasks keep what the weights already know."""


def make_example(task: str, source: Source, *, max_tokens: int) -> Example:
    """One example of a task; look-ups, copies and long dialogues grow with `max_tokens`."""
    makers: dict[str, Callable[[Source], Example]] = {
        "capitals": capitals,
        "facts": facts,
        "arithmetic": arithmetic,
        "stories": stories,
        "dialogues": dialogues,
        "json": json_answers,
        "tools": tools,
        "lookup": lambda source: lookup(source, max_tokens),
        "copying": lambda source: copying(source, max_tokens),
        "long dialogues": lambda source: long_dialogue(source, max_tokens),
    }
    return makers[task](source)


def open_source(split: Split, *key: object) -> Source:
    """A random source that depends only on the split and the key."""
    return Source(random.Random(repr((split.value, *key))), split)
