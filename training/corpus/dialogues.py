"""Everyday dialogues: greetings, things to remember, lists, small jobs on words.

Held out are names with the thing to remember, and the words that a job is done on.
"""

from training.corpus.chat import Message, assistant, dialogue, system, user
from training.corpus.example import Example, Source
from training.corpus.facts import capitalised
from training.corpus.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    FRUITS,
    HOBBIES,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
)

TASK = "dialogues"
MOST_TURNS = 12
TOKENS_OF_A_TURN = 28

GREETINGS = ("Hello!", "Hi!", "Hi there.", "Good morning!", "Hey!", "Hello, how are you?")
GREETING_REPLIES = (
    "Hello! How can I help you?",
    "Hi! What can I do for you today?",
    "Hello! It is nice to hear from you.",
)
ABOUT = (
    ("Who are you?", "I am Cadenza, a small language model."),
    ("What is your name?", "My name is Cadenza."),
    ("What are you?", "I am a small language model that answers simple questions."),
    ("What can you do?", "I can tell stories, answer simple questions, do sums and call tools."),
    ("Are you a person?", "No, I am a small language model."),
    ("How big are you?", "I am very small: a few million parameters."),
    ("Thank you!", "You are welcome!"),
    ("Thanks for your help.", "You are welcome! Ask me again at any time."),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("See you later.", "See you later!"),
    ("Can you help me?", "Of course! What do you need?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
)
CATEGORIES = {
    "animals": ANIMALS,
    "colours": COLOURS,
    "fruits": FRUITS,
    "jobs": JOBS,
    "hobbies": HOBBIES,
    "foods": FOODS,
}
NUMBER_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5}
TRAITS = {
    "favourite colour": COLOURS,
    "favourite food": FOODS,
    "favourite animal": ANIMALS,
    "hobby": HOBBIES,
    "job": JOBS,
}
SYSTEMS = ("You are a helpful assistant.", "You are Cadenza.", "Be kind and brief.")
WORDS = tuple(sorted({*THINGS, *COLOURS, *ANIMALS, *JOBS, *PLACES, *FOODS}))


def dialogues(source: Source) -> Example:
    messages = [system(source.pick(SYSTEMS))] if source.chance(0.2) else []
    if source.chance(0.15):
        messages += [user(source.pick(GREETINGS)), assistant(source.pick(GREETING_REPLIES))]
    make = source.pick((_remember, _remember, _word_job, _word_job, _word_job, _about, _list))
    return dialogue(TASK, messages + make(source))


def long_dialogue(source: Source, max_tokens: int) -> Example:
    """Up to `MOST_TURNS` turns, as many as `max_tokens` tokens have room for."""
    most = max(2, min(MOST_TURNS, max_tokens // TOKENS_OF_A_TURN))
    return dialogue_of_turns(source, source.rng.randint(min(3, most), most))


def dialogue_of_turns(source: Source, num_turns: int) -> Example:
    """The first turn tells a name and a trait, the last asks for one; some between ask too."""
    told, ask_name, ask_trait = _introduction(source)
    messages = told
    for _ in range(num_turns - 2):
        make = source.pick((_about, _word_job, _word_job))
        asks = source.chance(0.25)
        messages = messages + (source.pick((ask_name, ask_trait)) if asks else make(source))
    return dialogue(TASK, messages + source.pick((ask_name, ask_trait)))


def _remember(source: Source) -> list[Message]:
    """States a fact, changes the subject, then asks for the fact."""
    messages, ask_name, ask_trait = _introduction(source)
    for _ in range(source.pick((0, 1, 1, 2))):
        messages += source.pick((_about, _word_job))(source)
    return messages + (ask_name if source.chance(0.5) else ask_trait)


def _introduction(source: Source) -> tuple[list[Message], list[Message], list[Message]]:
    """The turn that tells a name and a trait, and the turns that ask for each."""
    trait = source.pick(tuple(TRAITS))
    name, value = source.draw(lambda: (source.pick(NAMES), source.pick(TRAITS[trait])))
    told = source.pick(
        (
            "My name is {n} and my {t} is {v}.",
            "I am {n}. My {t} is {v}.",
            "Hi, {n} here. My {t}: {v}.",
        )
    ).format(n=name, t=trait, v=value)
    return (
        [user(told), assistant(f"Nice to meet you, {name}!")],
        [user("What is my name?"), assistant(f"Your name is {name}.")],
        [user(f"What is my {trait}?"), assistant(f"Your {trait} is {value}.")],
    )


def _word_job(source: Source) -> list[Message]:
    job = source.pick((_repeat, _repeat, _spell, _count, _upper, _pick_out))
    return job(source)


def _some_words(source: Source, least: int, most: int) -> list[str]:
    return source.draw(lambda: source.rng.sample(WORDS, source.rng.randint(least, most)))


def _repeat(source: Source) -> list[Message]:
    text = " ".join(_some_words(source, 2, 7))
    request = source.pick(("Repeat after me: {}", "Say this again: {}", "Copy these words: {}"))
    return [user(request.format(text)), assistant(text)]


def _spell(source: Source) -> list[Message]:
    (word,) = _some_words(source, 1, 1)
    return [user(f"Spell the word {word}."), assistant("-".join(word))]


def _count(source: Source) -> list[Message]:
    words = _some_words(source, 2, 6)
    return [user(f"How many words are here: {' '.join(words)}"), assistant(str(len(words)))]


def _upper(source: Source) -> list[Message]:
    (word,) = _some_words(source, 1, 1)
    return [user(f"Write {word} in capital letters."), assistant(word.upper())]


def _pick_out(source: Source) -> list[Message]:
    words = _some_words(source, 3, 6)
    place = source.pick(("first", "last"))
    answer = words[0] if place == "first" else words[-1]
    return [user(f"What is the {place} word of this list: {', '.join(words)}"), assistant(answer)]


def _about(source: Source) -> list[Message]:
    question, reply = source.pick(ABOUT)
    return [user(question), assistant(reply)]


def _list(source: Source) -> list[Message]:
    category = source.pick(tuple(CATEGORIES))
    number = source.pick(tuple(NUMBER_WORDS))
    items = source.rng.sample(CATEGORIES[category], NUMBER_WORDS[number])
    request = source.pick(("Name {} {}.", "Give me {} {}.", "List {} {}.")).format(number, category)
    style = source.pick(("", " as a numbered list", " as a list"))
    if not style:
        return [user(request), assistant(capitalised(", ".join(items)) + ".")]
    marks = [f"{i}." for i in range(1, 6)] if "numbered" in style else ["-"] * 5
    reply = "\n".join(f"{mark} {item}" for mark, item in zip(marks, items, strict=False))
    return [user(request[:-1] + style + "."), assistant(reply)]
