"""The tasks of `cadenza bench spec-prefill`: long generated texts with questions; each says what a
right answer begins with, and which part of the prompt must be kept to give it. Invariant: the same
seed gives the same prompts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cadenza.errors import ConfigError
from cadenza.sparse_prefill import PromptSpan

TaskKind = Literal["needle", "key_value", "quote", "count", "asked_before"]
# A code hidden in other text; one of many room numbers; a sentence to be repeated; how many notes
# give a room number; the first of these, with the question before the text, too.
KINDS: tuple[TaskKind, ...] = get_args(TaskKind)

Encode = Callable[[str], Sequence[int]]

_NUM_KEYS = 16
_COUNTS = (2, 5)
_MAX_ANSWER = {"needle": 8, "key_value": 8, "quote": 24, "count": 4, "asked_before": 8}

_CITIES = (
    *("Oslo", "Lima", "Cairo", "Paris", "Rome", "Madrid", "Vienna", "Prague"),
    *("Berlin", "London", "Tokyo", "Athens", "Dublin", "Lisbon", "Warsaw", "Moscow"),
)
_NAMES = (
    *("Emma", "Tom", "Anna", "Ben", "Lena", "Max", "Clara", "Paul", "Nina", "Leo"),
    *("Mia", "Oscar", "Ella", "Hugo", "Vera", "Felix", "Ida", "Otto", "Rosa", "Jonas"),
)
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "grey", "brown")
_THINGS = ("bell", "lantern", "boat", "kite", "pencil", "stone", "basket", "clock")
_PLACES = ("garden", "library", "kitchen", "attic", "cellar", "market", "tower", "garage")
_WHEN = ("In the morning", "At noon", "Later", "In the evening", "That night", "One cold day")
_DEEDS = (
    *("went to the river", "painted a picture of the hills", "baked bread for the neighbours"),
    *("walked along the old wall", "waited for the rain to end", "wrote a long letter"),
    *("planted an apple tree", "looked for the lost cat", "told a story about the sea"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    """`answer`: what a right one begins with, without spaces around it; `sought`: the tokens that
    hold it; `depth`: of these, from 0 for the beginning of the text to 1 for its end; None of
    several, which are anywhere."""

    kind: TaskKind
    token_ids: tuple[int, ...]
    answer: str
    sought: tuple[PromptSpan, ...]
    depth: float | None

    @property
    def max_tokens(self) -> int:
        return _MAX_ANSWER[self.kind]

    def is_right(self, text: str) -> bool:
        return text.strip().startswith(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Notes that are put into a text, those that hold the answer first, and what is asked."""

    notes: tuple[str, ...]
    num_sought: int
    question: str
    answer: str


def make_prompt(
    kind: TaskKind, num_tokens: int, depth: float, seed: int, encode: Encode
) -> TaskPrompt:
    """A prompt of about `num_tokens` tokens, and not more. Raises ConfigError if it has no room for
    its notes."""
    rng = random.Random(f"{kind} {num_tokens} {depth} {seed}")
    asked = _ASKED[kind](rng)
    opening, _, _ = asked.question.partition("\nAnswer")
    before = [f"{opening.strip()}\n"] if kind == "asked_before" else []
    fixed = len(encode("".join((*before, *asked.notes, asked.question)))) + len(asked.notes)
    filler: list[str] = []
    room = num_tokens - fixed
    while True:
        sentence = _sentence(rng)
        room -= len(encode(f" {sentence}"))
        if room < 0:
            break
        filler.append(sentence)
    if not filler:
        raise ConfigError(f"--input-len {num_tokens} is too short for the task {kind}: raise it")
    pieces = _mixed(rng, filler, asked, depth)
    texts = [*before, *(f"{' ' if place else ''}{text}" for place, (text, _) in enumerate(pieces))]
    is_sought = [*(False for _ in before), *(sought for _, sought in pieces)]
    parts = [encode(text) for text in (*texts, asked.question)]
    ends = [sum(map(len, parts[: place + 1])) for place in range(len(parts))]
    spans = [
        PromptSpan(end - len(part), end)
        for part, end, sought in zip(parts, ends, is_sought, strict=False)
        if sought
    ]
    ids = tuple(token_id for part in parts for token_id in part)
    return TaskPrompt(
        kind=kind,
        token_ids=ids,
        answer=asked.answer,
        sought=tuple(spans),
        depth=depth if asked.num_sought == 1 else None,
    )


def _mixed(
    rng: random.Random, filler: list[str], asked: _Asked, depth: float
) -> list[tuple[str, bool]]:
    """The sentences with the notes among them, and whether each is sought: one that is sought alone
    at the depth, all others anywhere."""
    notes = [(note, place < asked.num_sought) for place, note in enumerate(asked.notes)]
    first, others = notes[0], notes[1:]
    if asked.num_sought > 1:
        others = notes
    places = sorted(rng.randint(0, len(filler)) for _ in others)
    mixed: list[tuple[str, bool]] = []
    for place in range(len(filler) + 1):
        while places and places[0] == place:
            places.pop(0)
            mixed.append(others.pop(0))
        if place < len(filler):
            mixed.append((filler[place], False))
    if asked.num_sought == 1:
        mixed.insert(round(depth * len(mixed)), first)
    return mixed


def _sentence(rng: random.Random) -> str:
    if rng.random() < 0.3:
        thing = f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
        return f"The {thing} is in the {rng.choice(_PLACES)}."
    return f"{rng.choice(_WHEN)} {rng.choice(_NAMES)} {rng.choice(_DEEDS)}."


def _needle(rng: random.Random) -> _Asked:
    city, code = rng.choice(_CITIES), str(rng.randint(1000, 9999))
    ask = f"\nQuestion: What is the secret code of {city}?\nAnswer: The secret code of {city} is"
    return _Asked(
        notes=(f"The secret code of {city} is {code}.",), num_sought=1, question=ask, answer=code
    )


def _key_value(rng: random.Random) -> _Asked:
    names = rng.sample(_NAMES, _NUM_KEYS)
    rooms = [str(room) for room in rng.sample(range(100, 1000), _NUM_KEYS)]
    notes = [
        f"The room number of {name} is {room}." for name, room in zip(names, rooms, strict=True)
    ]
    name = names[0]
    ask = f"\nQuestion: What is the room number of {name}?\nAnswer: The room number of {name} is"
    return _Asked(notes=tuple(notes), num_sought=1, question=ask, answer=rooms[0])


def _quote(rng: random.Random) -> _Asked:
    name, city = rng.choice(_NAMES), rng.choice(_CITIES)
    rest = f"carried the {rng.choice(_COLOURS)} {rng.choice(_THINGS)} to the {rng.choice(_PLACES)}"
    start = f"On the way to {city} {name}"
    ask = f'\nRepeat the sentence that begins with "{start}":\n{start}'
    return _Asked(notes=(f"{start} {rest}.",), num_sought=1, question=ask, answer=rest)


def _count(rng: random.Random) -> _Asked:
    number = rng.randint(*_COUNTS)
    names = rng.sample(_NAMES, number)
    notes = [f"The room number of {name} is {rng.randint(100, 999)}." for name in names]
    ask = "\nQuestion: How many room numbers are given?\nAnswer: The number of room numbers is"
    return _Asked(notes=tuple(notes), num_sought=number, question=ask, answer=str(number))


_ASKED: dict[TaskKind, Callable[[random.Random], _Asked]] = {
    "needle": _needle,
    "key_value": _key_value,
    "quote": _quote,
    "count": _count,
    "asked_before": _needle,
}


def make_text(num_tokens: int, seed: int, encode: Encode) -> tuple[int, ...]:
    """A text of so many tokens without a question, to be gone on with."""
    rng = random.Random(f"text {num_tokens} {seed}")
    ids = [*encode(_sentence(rng))]
    while len(ids) < num_tokens:
        ids += encode(f" {_sentence(rng)}")
    return tuple(ids[:num_tokens])
