"""The examples of the corpus, and the random source that they are drawn from.

Owns the split between training and held-out text: everything that an example must not
leak (a pair of operands, a fact in one phrasing, a name with its number) is drawn with
`Source.draw`, which allows each such item on one side only.

Invariant: an example is a function of its source's seed and split.
"""

import enum
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

HELD_OUT_SHARE = 12
MOST_DRAWS = 300

T = TypeVar("T")
Span = tuple[int, int]


class Split(enum.Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One text.

    `learned` are the spans of characters that count in the loss; `answer` is the span
    that follows from what is before it, if there is one.
    """

    task: str
    text: str
    learned: tuple[Span, ...]
    answer: Span | None = None

    @property
    def prompt(self) -> str:
        assert self.answer is not None
        return self.text[: self.answer[0]]

    @property
    def expected(self) -> str:
        assert self.answer is not None
        return self.text[slice(*self.answer)]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A random source confined to one side of the split."""

    rng: random.Random
    split: Split

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def draw(self, make: Callable[[], T]) -> T:
        """The first generated item on this side of the split, decided by a hash of its repr.

        If none of `MOST_DRAWS` items is on this side, the last one.
        """
        thing = make()
        for _ in range(MOST_DRAWS):
            is_held_out = zlib.crc32(repr(thing).encode()) % HELD_OUT_SHARE == 0
            if is_held_out == (self.split is Split.HELD_OUT):
                break
            thing = make()
        return thing


def completion(task: str, prompt: str, answer: str, rest: str = "") -> Example:
    """Plain text that is learned completely; `rest` follows the answer."""
    text = prompt + answer + rest + END_OF_TEXT
    start, end = len(prompt), len(prompt) + len(answer)
    return Example(task=task, text=text, learned=((0, len(text)),), answer=(start, end))


def questions(task: str, context: str, pairs: Sequence[tuple[str, str]]) -> Example:
    """A context, then prompts with answers; only the answers are learned."""
    text, learned = context, []
    for prompt, answer in pairs:
        start = len(text) + len(prompt)
        text += prompt + answer
        learned.append((start, len(text)))
    answer_span = learned[-1]
    learned[-1] = (answer_span[0], len(text) + len(END_OF_TEXT))
    return Example(task=task, text=text + END_OF_TEXT, learned=tuple(learned), answer=answer_span)
