"""Look-up: notes scattered in a long text, and questions about them at its end.

Held out are the keys of the notes: a subject together with its value.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from training.corpus.chat import assistant, dialogue, user
from training.corpus.countries import CITIES
from training.corpus.example import Example, Source, questions
from training.corpus.facts import statement
from training.corpus.stories import story
from training.corpus.words import COLOURS, NAMES, PLACES, THINGS

TASK = "lookup"

CHARACTERS_OF_A_TOKEN = 4.1
SHORTEST_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """Notes that differ in subject `{s}` and value `{v}`; both sentences end with the value."""

    note: str
    question: str
    subjects: tuple[str, ...]
    value: Callable[[Source], str]


@dataclass(frozen=True, slots=True)
class Note:
    kind: Kind
    subject: str
    value: str

    @property
    def sentence(self) -> str:
        return self.kind.note.format(s=self.subject, v=self.value) + "."

    @property
    def question(self) -> str:
        return self.kind.question.format(s=self.subject)

    @property
    def opening(self) -> str:
        """The sentence up to its value."""
        return self.kind.note.removesuffix(" {v}").format(s=self.subject)


KINDS = (
    Kind(
        "The secret code of {s} is {v}",
        "What is the secret code of {s}?",
        CITIES,
        lambda source: str(source.rng.randint(1000, 9999)),
    ),
    Kind(
        "The {s} is in the {v}",
        "Where is the {s}?",
        tuple(f"{colour} {thing}" for colour in COLOURS for thing in THINGS),
        lambda source: source.pick(PLACES),
    ),
    Kind(
        "The favourite colour of {s} is {v}",
        "What is the favourite colour of {s}?",
        NAMES,
        lambda source: source.pick(COLOURS),
    ),
    Kind(
        "The {s} belongs to {v}",
        "Who does the {s} belong to?",
        tuple(f"{colour} {thing}" for colour in COLOURS for thing in THINGS),
        lambda source: source.pick(NAMES),
    ),
    Kind(
        "The room number of {s} is {v}",
        "What is the room number of {s}?",
        NAMES,
        lambda source: str(source.rng.randint(100, 999)),
    ),
)


def lookup(source: Source, max_tokens: int) -> Example:
    """Notes in a text of up to about `max_tokens` tokens, then one or more questions."""
    length = SHORTEST_TOKENS * (max_tokens / SHORTEST_TOKENS) ** source.rng.random()
    return lookup_of_length(source, int(length))


def lookup_of_length(source: Source, num_tokens: int) -> Example:
    """As `lookup`, at a length of about `num_tokens`."""
    characters = int(num_tokens * CHARACTERS_OF_A_TOKEN)
    most = max(1, min(24, characters // 120))
    notes = _notes(source, source.rng.randint(max(1, most // 3), most))
    asked = source.rng.sample(notes, min(len(notes), source.rng.randint(1, 8)))
    text = _scatter(source, notes, characters - 60 * len(asked))
    if source.chance(0.5):
        pairs = [
            (f"\nQuestion: {note.question}\nAnswer: {note.opening}", f" {note.value}.")
            for note in asked
        ]
        return questions(TASK, text, pairs)
    messages = []
    for note in asked:
        request = note.question if messages else f"{text}\n\n{note.question}"
        messages += [user(request), assistant(note.sentence)]
    return dialogue(TASK, messages)


def _notes(source: Source, number: int) -> list[Note]:
    """Notes of one or more kinds; subjects are unique within a kind."""
    kinds = source.rng.sample(KINDS, source.pick((1, 2, 3)))
    notes: dict[tuple[str, str], Note] = {}
    while len(notes) < number:
        kind = source.pick(kinds)
        subject, value = source.draw(functools.partial(_subject_and_value, source, kind))
        notes[kind.note, subject] = Note(kind, subject, value)
    return list(notes.values())


def _subject_and_value(source: Source, kind: Kind) -> tuple[str, str]:
    return source.pick(kind.subjects), kind.value(source)


def _scatter(source: Source, notes: list[Note], characters: int) -> str:
    """The notes in order, with filler between them up to the requested length."""
    sentences = [note.sentence for note in notes]
    missing = characters - sum(map(len, sentences))
    while missing > 0:
        text = story(source) if missing > 600 and source.chance(0.5) else statement(source)
        sentences.insert(source.rng.randint(0, len(sentences)), text)
        missing -= len(text)
    return " ".join(sentences)
