"""Short stories from a grammar: a hero, a wish, trouble, help, an end, names kept throughout.

Stories have no single right answer; they are measured by loss and read by people.
"""

import re
from dataclasses import dataclass

from training.corpus.chat import assistant, dialogue, user
from training.corpus.example import END_OF_TEXT, Example, Source
from training.corpus.words import ANIMALS, COLOURS, JOBS, NAMES, THINGS

TASK = "stories"

TRAITS = "little young old clever shy brave kind curious lazy cheerful quiet proud hungry".split()
SETTINGS = (
    "in a small village by the sea",
    "at the edge of a dark forest",
    "in a tall house on a hill",
    "near a wide river",
    "in a busy town",
    "on a farm far from the city",
    "under an old oak tree",
    "in a valley full of flowers",
    "on a little island",
    "next to a windmill",
)
WEATHERS = (
    "One sunny morning",
    "One cold winter day",
    "One rainy afternoon",
    "One evening in autumn",
    "Early one spring morning",
    "One windy day",
    "On the first day of summer",
    "Late one night",
)
LOSSES = (
    "the {thing} was gone",
    "the {thing} fell into the river",
    "the wind carried the {thing} away",
    "the {thing} broke in two",
    "somebody had taken the {thing}",
    "the {thing} rolled down the hill",
)
SEARCHES = (
    "{hero} looked under the bed and behind the door, but found nothing",
    "{hero} asked everyone in the street, but nobody had seen it",
    "{hero} walked and walked until {his} feet hurt",
    "{hero} sat down on a stone and began to cry",
    "{hero} searched until the moon came up",
)
RETURNS = {
    "gone": "{friend} found it in a hollow tree",
    "river": "{friend} jumped into the water and brought it back",
    "wind": "{friend} climbed onto the roof and caught it",
    "broke": "{friend} took some glue and mended it",
    "taken": "{friend} followed the footprints and found it in the barn",
    "rolled": "{friend} ran down the hill and picked it up",
}
WISHES = (
    ("to learn to swim", "the water was cold and deep", "swam across the whole lake"),
    ("to see the sea", "the road was long and steep", "stood on the beach and watched the waves"),
    (
        "to bake the best cake in town",
        "the first cake was burnt",
        "won the first prize at the fair",
    ),
    ("to build a boat", "there was not enough wood", "sailed down the river in a new boat"),
    (
        "to sing in front of everyone",
        "no sound would come out",
        "sang so well that everyone clapped",
    ),
    ("to climb the mountain", "the path was full of snow", "stood on the top and waved"),
    ("to grow a giant pumpkin", "the sun had dried the earth", "had the biggest pumpkin of all"),
    ("to fly a kite", "there was no wind at all", "saw the kite dance high in the sky"),
    ("to count all the stars", "clouds covered the sky", "counted more than a thousand stars"),
    ("to paint a picture of the moon", "there was no paint left", "hung the picture over the bed"),
)
HELPS = (
    '"Do not give up," said {friend}. "I will help you."',
    '"Let us try it together," said {friend}.',
    '{friend} smiled and said, "I have an idea."',
    '"Why are you sad?" asked {friend}, and {hero} told the whole story.',
    "{friend} heard about it and came at once.",
)
PRACTICES = (
    "They worked every day for a week.",
    "{friend} showed {hero} how to do it, step by step.",
    "They tried once, they tried twice, and the third time it went well.",
    "They waited until the next morning and tried again.",
)
MEETINGS = (
    "{he} met {friend}, a {trait2} {kind2}",
    "{he} saw {friend}, a {trait2} {kind2}, sitting by the road",
    "a {trait2} {kind2} named {friend} knocked at the door",
)
ENDINGS = (
    "{hero} was very happy and thanked {friend}.",
    "From that day on, {hero} and {friend} were best friends.",
    "{hero} and {friend} shared a cake and laughed until it was dark.",
    "That night {hero} slept well and dreamed of {friend}.",
    "And whenever {hero} had a problem, {he} remembered {friend}.",
    "{hero} learned that it is good to ask for help.",
    "{hero} learned that a friend is worth more than a {colour} {thing}.",
)
OPENINGS = (
    "Once upon a time there was a {trait} {kind} named {hero} who lived {setting}.",
    "There once was a {trait} {kind} called {hero}. {He} lived {setting}.",
    "{hero} was a {trait} {kind} who lived {setting}.",
    "{Setting} lived a {trait} {kind} named {hero}.",
    "Long ago, {setting}, there lived a {trait} {kind}. {His} name was {hero}.",
)
REQUESTS = (
    "Tell me a story about a {kind}.",
    "Write a short story about a {trait} {kind}.",
    "Please tell me a story about a {kind} named {hero}.",
    "Write a story about {hero} the {kind}.",
    "Can you tell me a bedtime story about a {kind}?",
    "Write a short story about {hero} and {friend}.",
)
BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])")
PRONOUNS = (("he", "his"), ("she", "her"))


@dataclass(frozen=True, slots=True)
class Cast:
    """The words that stay the same through one story."""

    words: dict[str, str]

    def say(self, template: str) -> str:
        text = BEFORE_VOWEL.sub(r"\1n ", template.format(**self.words))
        return text[0].upper() + text[1:]


def stories(source: Source) -> Example:
    cast = _cast(source)
    text = story(source, cast)
    kind = source.rng.random()
    if kind < 0.35:
        request = cast.say(source.pick(REQUESTS))
        return dialogue(TASK, [user(request), assistant(text)])
    if kind < 0.45:
        text = cast.say("Title: {hero} and the {colour} {thing}\n\n") + text
    text += END_OF_TEXT
    return Example(task=TASK, text=text, learned=((0, len(text)),))


def story(source: Source, cast: Cast | None = None) -> str:
    cast = cast or _cast(source)
    tell = source.pick((_lost_thing, _lost_thing, _wish, _wish, _gift))
    return cast.say(source.pick(OPENINGS)) + " " + tell(source, cast)


def _cast(source: Source) -> Cast:
    hero, friend = source.draw(lambda: tuple(source.rng.sample(NAMES, 2)))
    he, his = source.pick(PRONOUNS)
    setting = source.pick(SETTINGS)
    trait, trait2 = source.rng.sample(TRAITS, 2)
    kind, kind2 = source.rng.sample(ANIMALS + JOBS, 2)
    words = {
        "hero": hero,
        "friend": friend,
        "he": he,
        "He": he.capitalize(),
        "his": his,
        "His": his.capitalize(),
        "setting": setting,
        "Setting": setting.capitalize(),
        "trait": trait,
        "trait2": trait2,
        "kind": kind,
        "kind2": kind2,
        "thing": source.pick(THINGS),
        "colour": source.pick(COLOURS),
    }
    return Cast(words)


def _lost_thing(source: Source, cast: Cast) -> str:
    loss = source.pick(LOSSES)
    found = next(text for cue, text in RETURNS.items() if cue in loss)
    parts = [
        source.pick(
            (
                "{He} had a {colour} {thing}, and {he} loved it more than anything.",
                "{hero} took {his} {colour} {thing} everywhere.",
                "{His} greatest treasure was a {colour} {thing}.",
            )
        ),
        f"{source.pick(WEATHERS)} {loss}.",
        source.pick(SEARCHES) + ".",
        "Then " + source.pick(MEETINGS) + ".",
        source.pick(HELPS),
        found + ", and gave the {thing} back to {hero}.",
        source.pick(ENDINGS),
    ]
    return " ".join(cast.say(part) for part in parts)


def _wish(source: Source, cast: Cast) -> str:
    wish, trouble, success = source.pick(WISHES)
    parts = [
        source.pick(("More than anything, {hero} wanted ", "{hero} had one wish: ")) + wish + ".",
        f"{source.pick(WEATHERS)} {{he}} set out to do it, but {trouble}.",
        source.pick(
            ("{hero} was sad.", "{hero} wanted to give up.", "{hero} did not know what to do.")
        ),
        "Then " + source.pick(MEETINGS) + ".",
        source.pick(HELPS),
        source.pick(PRACTICES),
        source.pick(("At last ", "In the end ", "And finally ")) + "{hero} " + success + ".",
        source.pick(ENDINGS[:-1]),
    ]
    return " ".join(cast.say(part) for part in parts)


def _gift(source: Source, cast: Cast) -> str:
    parts = [
        f"{source.pick(WEATHERS)} {{he}} found a {{colour}} {{thing}} on the road.",
        source.pick(('"Whose {thing} is this?" {he} asked.', '"How pretty it is!" said {hero}.')),
        source.pick(("{hero} wanted to keep it.", "{hero} put it in {his} pocket and walked on.")),
        "Soon " + source.pick(MEETINGS) + ".",
        source.pick(
            (
                '"I have lost my {thing}," said {friend}, "and I am so sad."',
                '"Have you seen a {colour} {thing}?" asked {friend}.',
            )
        ),
        source.pick(
            (
                "{hero} thought for a moment and gave the {thing} back.",
                '"Here it is," said {hero}, and gave {friend} the {colour} {thing}.',
            )
        ),
        source.pick(
            (
                "{friend} was so glad that {hero} was glad too.",
                "{friend} danced for joy and invited {hero} to supper.",
            )
        ),
        source.pick(ENDINGS[:-2]),
    ]
    return " ".join(cast.say(part) for part in parts)
