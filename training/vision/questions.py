"""Questions about a scene with their answers, by task.

Owns the phrasings and what makes a question answerable: it is asked only if the scene decides the
answer by a margin that an eye sees.  Knows no images, templates or tokens.

Invariant: a question is a function of its source and the scene.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from training.corpus.example import Source
from training.vision.scenes import BACKGROUNDS, COLOURS, KINDS, Scene, Thing

NO_IMAGE = "There is no image."
THIRDS = (1 / 3, 2 / 3)
MARGIN = 0.05
SMALL, LARGE = 0.15, 0.185
SHARE_OF_ABSENT = 0.12


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a task, and its answer."""

    task: str
    text: str
    answer: str


Maker = Callable[[Source, Scene], tuple[str, str] | None]


def ask(source: Source, scene: Scene, tasks: Sequence[str] | None = None) -> Question:
    """A question that the scene answers, of one of `tasks` (default: all, by their shares).

    None of the tasks may be answerable: then one about the background.
    """
    names = list(SHARES) if tasks is None else list(tasks)
    while names:
        weights = [SHARES[name] for name in names]
        (name,) = source.rng.choices(names, weights)
        found = MAKERS[name](source, scene)
        if found is not None:
            return Question(name, *found)
        names.remove(name)
    return Question("background", *_background(source, scene))


def _only(things: Sequence[Thing]) -> dict[str, Thing]:
    """Things that no other thing's kind equals, by kind."""
    kinds = [each.kind for each in things]
    return {each.kind: each for each in things if kinds.count(each.kind) == 1}


def _absent(source: Source, scene: Scene) -> str | None:
    kinds = [kind for kind in KINDS if all(each.kind != kind for each in scene.things)]
    return source.pick(kinds) if kinds and source.chance(SHARE_OF_ABSENT) else None


def _known(source: Source, scene: Scene) -> Thing | None:
    things = list(_only(scene.things).values())
    return source.pick(things) if things else None


def _colour(source: Source, scene: Scene) -> tuple[str, str] | None:
    phrasing = source.pick(
        (
            "What colour is the {}?",
            "What colour is the {}?",
            "What color is the {}?",
            "Which colour does the {} have?",
            "What is the colour of the {}?",
        )
    )
    if (kind := _absent(source, scene)) is not None:
        return phrasing.format(kind), f"There is no {kind}."
    thing = _known(source, scene)
    return thing and (phrasing.format(thing.kind), thing.colour)


def _shape(source: Source, scene: Scene) -> tuple[str, str] | None:
    if len(scene.things) == 1 and source.chance(0.5):
        texts = ("What shape is this?", "Which shape is in the image?", "What shape do you see?")
        return source.pick(texts), scene.things[0].kind
    colours = [each.colour for each in scene.things]
    things = [each for each in scene.things if colours.count(each.colour) == 1]
    if not things:
        return None
    thing = source.pick(things)
    texts = ("What shape is {}?", "Which shape is {}?", "What is the {} shape?")
    return source.pick(texts).format(thing.colour), thing.kind


def _count(source: Source, scene: Scene) -> tuple[str, str]:
    way = source.rng.random()
    if way < 0.4:
        texts = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
        return source.pick(texts), str(len(scene.things))
    if way < 0.75:
        kind = source.pick(KINDS) if source.chance(0.2) else source.pick(scene.things).kind
        plural = "crosses" if kind == "cross" else f"{kind}s"
        number = sum(each.kind == kind for each in scene.things)
        texts = ("How many {} are there?", "How many {} do you see?", "Count the {}.")
        return source.pick(texts).format(plural), str(number)
    colour = source.pick(tuple(COLOURS)) if source.chance(0.2) else source.pick(scene.things).colour
    number = sum(each.colour == colour for each in scene.things)
    texts = ("How many {} shapes are there?", "How many shapes are {}?")
    return source.pick(texts).format(colour), str(number)


NUM_PLACES = 9


def ninth_of(thing: Thing) -> int:
    """The index of the ninth of the image where the centre of a thing is, row by row."""
    column, row = (sum(value > line for line in THIRDS) for value in (thing.x, thing.y))
    return 3 * row + column


def place_of(thing: Thing) -> str | None:
    """The ninth of the image where a thing is; None near a line between two."""
    if any(abs(value - line) < MARGIN for value in (thing.x, thing.y) for line in THIRDS):
        return None
    row, column = divmod(ninth_of(thing), 3)
    words = ("top", "", "bottom")[row], ("left", "", "right")[column]
    return " ".join(word for word in words if word) or "centre"


def _place(source: Source, scene: Scene) -> tuple[str, str] | None:
    thing = _known(source, scene)
    place = thing and place_of(thing)
    if thing is None or place is None:
        return None
    texts = ("Where is the {}?", "In which part of the image is the {}?")
    return source.pick(texts).format(thing.kind), place


_SIDES: dict[str, Callable[[Thing, Thing], float]] = {
    "left of": lambda one, other: other.x - one.x,
    "right of": lambda one, other: one.x - other.x,
    "above": lambda one, other: other.y - one.y,
    "below": lambda one, other: one.y - other.y,
}
"""How far the first thing is on that side of the second one."""


def _neighbour(source: Source, scene: Scene) -> tuple[str, str] | None:
    thing = _known(source, scene)
    if thing is None or len(scene.things) < 2:
        return None
    side = source.pick(tuple(_SIDES))
    others = [each for each in scene.things if each is not thing]
    reaches = [_SIDES[side](each, thing) for each in others]
    if any(abs(reach) < MARGIN for reach in reaches):
        return None
    found = [each for each, reach in zip(others, reaches, strict=True) if reach > 0]
    if len(found) > 1:
        return None
    answer = _named(found[0]) if found else "nothing"
    return f"What is {side} the {thing.kind}?", answer


def _relation(source: Source, scene: Scene) -> tuple[str, str] | None:
    known = list(_only(scene.things).values())
    if len(known) < 2:
        return None
    one, other = source.rng.sample(known, 2)
    side = source.pick(tuple(_SIDES))
    reach = _SIDES[side](one, other)
    if abs(reach) < MARGIN:
        return None
    return f"Is the {one.kind} {side} the {other.kind}?", "yes" if reach > 0 else "no"


def _size(source: Source, scene: Scene) -> tuple[str, str] | None:
    thing = _known(source, scene)
    if thing is None or SMALL < thing.radius < LARGE:
        return None
    texts = ("Is the {} large or small?", "How large is the {}?", "Is the {} small or large?")
    return source.pick(texts).format(thing.kind), "small" if thing.radius <= SMALL else "large"


def _background(source: Source, scene: Scene) -> tuple[str, str]:
    texts = ("What colour is the background?", "Which colour has the background?")
    return source.pick(texts), scene.background


def _existence(source: Source, scene: Scene) -> tuple[str, str]:
    if source.chance(0.5):
        kind = source.pick(KINDS) if source.chance(0.5) else source.pick(scene.things).kind
        answer = any(each.kind == kind for each in scene.things)
        return f"Is there a {kind}?", "yes" if answer else "no"
    near = source.pick(scene.things)
    colour, kind = near.colour, near.kind
    if source.chance(0.3):
        colour = source.pick(tuple(COLOURS))
    elif source.chance(0.4):
        kind = source.pick(KINDS)
    answer = any((each.colour, each.kind) == (colour, kind) for each in scene.things)
    return f"Is there {_with_article(f'{colour} {kind}')}?", "yes" if answer else "no"


def _description(source: Source, scene: Scene) -> tuple[str, str] | None:
    things = sorted(scene.things, key=lambda each: each.x)
    if any(b.x - a.x < MARGIN for a, b in pairwise(things)):
        return None
    names = [_named(each) for each in things]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    answer = f"{listed[0].upper()}{listed[1:]} on a {scene.background} background."
    texts = ("Describe the image.", "What is in the image?", "What do you see?")
    texts += ("What does the image show?", "Describe the picture.")
    return source.pick(texts), answer


def _named(thing: Thing) -> str:
    return _with_article(f"{thing.colour} {thing.kind}")


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def without_image(source: Source) -> Question:
    """A question about an image that is not there, or a greeting."""
    if source.chance(0.2):
        return Question("no image", source.pick(("Hello", "Hello!", "Hi", "Hi!")), GREETING)
    if source.chance(0.15):
        texts = ("What can you do?", "Who are you?", "Help", "What are you?")
        return Question("no image", source.pick(texts), ABILITIES)
    background = source.pick(BACKGROUNDS)
    thing = Thing(
        kind=source.pick(KINDS),
        colour=source.pick([each for each in COLOURS if each != background]),
        x=0.2,
        y=0.8,
        radius=0.1,
        angle=0.0,
        rgb=(0, 0, 0),
    )
    scene = Scene(background=background, background_rgb=(0, 0, 0), things=(thing,))
    return Question("no image", ask(source, scene).text, NO_IMAGE)


def of_two(source: Source, scenes: tuple[Scene, Scene]) -> Question:
    """A question about one of two images, named by its place."""
    index = source.pick((0, 1))
    name = ("first", "second")[index]
    question = ask(source, scenes[index], ("colour", "shape", "count", "background", "place"))
    text = f"{question.text[:-1]} in the {name} image{question.text[-1]}"
    return Question("two images", text, question.answer)


GREETING = "Hello! Show me an image of shapes and ask about it."
ABILITIES = "I see shapes in images: their kind, colour, number, size and place."

MAKERS: dict[str, Maker] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "place": _place,
    "neighbour": _neighbour,
    "relation": _relation,
    "size": _size,
    "background": _background,
    "existence": _existence,
    "description": _description,
}
SHARES: dict[str, float] = {
    "colour": 0.16,
    "shape": 0.14,
    "count": 0.17,
    "place": 0.11,
    "neighbour": 0.1,
    "relation": 0.08,
    "size": 0.06,
    "background": 0.04,
    "existence": 0.07,
    "description": 0.07,
}
"""Of the questions."""
