"""Copying: text that occurs twice, lists of keys with values, and requests to repeat a text.

Only what can be copied is learned.  Words are mostly made up of random syllables, so that
nothing but the earlier text predicts them.  Held out are the first two words of a text.
"""

from training.corpus.chat import assistant, dialogue, user
from training.corpus.countries import CITIES
from training.corpus.dialogues import WORDS
from training.corpus.example import Example, Source, questions
from training.corpus.facts import statement
from training.corpus.words import NAMES

TASK = "copying"

CONSONANTS = "bcdfghjklmnprstvwxyz"
VOWELS = "aeiou"
TOKENS_OF_A_WORD = 3.2
TOKENS_OF_A_PAIR = 9
TOKENS_OF_A_STATEMENT = 12
TOKENS_OF_A_QUESTION = 14
SHORTEST_TOKENS = 60
MOST_ASKED = 12

REQUESTS = (
    "Repeat this text: {}",
    "Copy this text word for word: {}",
    "Say this again: {}",
    "{}\n\nRepeat the text above.",
)
KEY_REQUESTS = ("What is the value of {}?", "{}?", "Which value belongs to {}?")


def copying(source: Source, max_tokens: int) -> Example:
    """A text of up to about `max_tokens` tokens with a part that repeats an earlier part."""
    tokens = int(SHORTEST_TOKENS * (max_tokens / SHORTEST_TOKENS) ** source.rng.random())
    make = source.pick((_twice, _twice, _pairs, _pairs, _pairs, _quoted))
    return make(source, tokens)


def _twice(source: Source, tokens: int) -> Example:
    """Random words, then a span of them again; the first two words of the span are given."""
    words = _random_words(source, max(8, int(tokens / 1.6 / TOKENS_OF_A_WORD)))
    size = source.rng.randint(4, max(4, int(len(words) * 0.6)))
    start = source.rng.randint(0, len(words) - size)
    span = words[start : start + size]
    context = " ".join(words) + source.pick(("\n", "\n\n", " | ", "\nAgain:"))
    return questions(TASK, context, [(" " + " ".join(span[:2]), " " + " ".join(span[2:]))])


def _pairs(source: Source, tokens: int) -> Example:
    """A list of keys with values, then some of the keys again with their values."""
    room = tokens - TOKENS_OF_A_QUESTION * MOST_ASKED // 2
    keys = tuple(dict.fromkeys(_random_words(source, max(2, room // TOKENS_OF_A_PAIR))))
    pairs = [(key, _value(source)) for key in keys]
    asked = source.rng.sample(pairs, min(len(pairs), source.rng.randint(1, MOST_ASKED)))
    mark = source.pick((": ", " = ", " -> ", " is "))
    separator = source.pick(("\n", ", ", "; ", ". "))
    listed = separator.join(f"{key}{mark}{value}" for key, value in pairs)
    if source.chance(0.5):
        prompts = [(f"\n{key}{mark.rstrip()}", f" {value}\n") for key, value in asked]
        return questions(TASK, listed + "\n", prompts)
    messages = []
    request = source.pick(KEY_REQUESTS)
    for key, value in asked:
        text = request.format(key)
        messages += [user(text if messages else f"{listed}\n\n{text}"), assistant(value)]
    return dialogue(TASK, messages)


def _quoted(source: Source, tokens: int) -> Example:
    """A request to repeat sentences or words."""
    if source.chance(0.5):
        number = max(1, tokens // 2 // TOKENS_OF_A_STATEMENT)
        text = " ".join(statement(source) for _ in range(number))
    else:
        text = " ".join(_random_words(source, max(3, int(tokens / 2 / TOKENS_OF_A_WORD))))
    return dialogue(TASK, [user(source.pick(REQUESTS).format(text)), assistant(text)])


def _random_words(source: Source, number: int) -> list[str]:
    start = source.draw(lambda: [_word(source), _word(source)])
    return start + [_word(source) for _ in range(number - len(start))]


def _word(source: Source) -> str:
    kind = source.rng.random()
    if kind < 0.35:
        return source.pick(WORDS)
    if kind < 0.5:
        return source.pick(NAMES) if source.chance(0.5) else source.pick(CITIES)
    if kind < 0.65:
        return str(source.rng.randint(0, 9999))
    syllables = source.rng.randint(1, 3)
    return "".join(source.pick(CONSONANTS) + source.pick(VOWELS) for _ in range(syllables))


def _value(source: Source) -> str:
    return _word(source) if source.chance(0.6) else str(source.rng.randint(100, 9999))
