"""The facts that the bundled model memorises, with their phrasings.

A relation has pairs of a subject `{s}` and an object `{o}`.  Each statement ends with
the object, so that the text before it can be used as a prompt.
"""

from dataclasses import dataclass

from training.corpus.countries import COUNTRIES

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """`reverse` statements end with the subject, for relations whose object determines it."""

    task: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    pairs: tuple[Pair, ...]
    reverse: tuple[str, ...] = ()


def _pairs(text: str) -> tuple[Pair, ...]:
    """Pairs written as `subject:object`, separated by commas."""
    pairs = [entry.strip().split(":") for entry in text.split(",")]
    return tuple((subject, value) for subject, value in pairs)


def _swapped_too(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    return pairs + tuple((value, subject) for subject, value in pairs)


ELEMENTS = _pairs(
    "hydrogen:H, helium:He, lithium:Li, beryllium:Be, boron:B, carbon:C, nitrogen:N, oxygen:O, "
    "fluorine:F, neon:Ne, sodium:Na, magnesium:Mg, aluminium:Al, silicon:Si, phosphorus:P, "
    "sulfur:S, chlorine:Cl, argon:Ar, potassium:K, calcium:Ca, titanium:Ti, chromium:Cr, "
    "manganese:Mn, iron:Fe, cobalt:Co, nickel:Ni, copper:Cu, zinc:Zn, arsenic:As, bromine:Br, "
    "krypton:Kr, silver:Ag, cadmium:Cd, tin:Sn, iodine:I, xenon:Xe, barium:Ba, tungsten:W, "
    "platinum:Pt, gold:Au, mercury:Hg, lead:Pb, bismuth:Bi, radon:Rn, radium:Ra, uranium:U"
)
SOUNDS = _pairs(
    "dog:bark, cat:meow, cow:moo, sheep:baa, pig:oink, duck:quack, horse:neigh, lion:roar, "
    "wolf:howl, frog:croak, bee:buzz, snake:hiss, owl:hoot, donkey:bray, mouse:squeak, "
    "crow:caw, hen:cluck, dove:coo, elephant:trumpet, goose:honk"
)
YOUNG = _pairs(
    "dog:puppy, cat:kitten, cow:calf, sheep:lamb, pig:piglet, duck:duckling, horse:foal, "
    "lion:cub, goat:kid, hen:chick, frog:tadpole, goose:gosling, deer:fawn, kangaroo:joey, "
    "swan:cygnet, owl:owlet"
)
OPPOSITES = _pairs(
    "hot:cold, big:small, tall:short, fast:slow, light:dark, happy:sad, old:young, rich:poor, "
    "full:empty, open:closed, wet:dry, hard:soft, early:late, loud:quiet, strong:weak, "
    "clean:dirty, near:far, high:low, wide:narrow, thick:thin, up:down, in:out, left:right, "
    "day:night, front:back, true:false, yes:no, day:night, love:hate, win:lose, buy:sell, "
    "push:pull, give:take, begin:end, remember:forget, top:bottom, sweet:sour, brave:afraid, "
    "smooth:rough, sharp:blunt, heavy:weightless, deep:shallow, first:last, always:never, "
    "before:after, inside:outside, north:south, east:west, summer:winter, sunrise:sunset"
)
PLURALS = _pairs(
    "child:children, man:men, woman:women, foot:feet, tooth:teeth, mouse:mice, goose:geese, "
    "sheep:sheep, ox:oxen, leaf:leaves, wolf:wolves, knife:knives, life:lives, box:boxes, "
    "city:cities, baby:babies, dish:dishes, hero:heroes, cat:cats, book:books, house:houses, "
    "shelf:shelves, story:stories, church:churches, fish:fish, person:people, wife:wives"
)
PAST = _pairs(
    "go:went, see:saw, eat:ate, run:ran, take:took, give:gave, come:came, write:wrote, "
    "speak:spoke, drive:drove, fly:flew, know:knew, sing:sang, swim:swam, begin:began, "
    "drink:drank, break:broke, buy:bought, think:thought, bring:brought, teach:taught, "
    "catch:caught, find:found, make:made, say:said, sleep:slept, feel:felt, walk:walked, "
    "jump:jumped, play:played, sit:sat, stand:stood, win:won, lose:lost, tell:told, hear:heard"
)
SIDES = _pairs(
    "triangle:three, square:four, rectangle:four, pentagon:five, hexagon:six, heptagon:seven, "
    "octagon:eight, nonagon:nine, decagon:ten"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()


def _each_to_next(cycle: list[str]) -> tuple[Pair, ...]:
    return tuple(zip(cycle, cycle[1:] + cycle[:1], strict=True))


def _each_to_previous(cycle: list[str]) -> tuple[Pair, ...]:
    return tuple((later, earlier) for earlier, later in _each_to_next(cycle))


CAPITAL = Relation(
    task="capitals",
    statements=(
        "The capital of {s} is {o}",
        "The capital city of {s} is {o}",
        "{s}'s capital is {o}",
        "{s} has a capital called {o}",
        "In {s}, the capital is {o}",
        "If you visit the capital of {s}, you are in {o}",
        "Country: {s}. Capital: {o}",
        "{s}: {o}",
        "The government of {s} sits in its capital, {o}",
        "Every map of {s} shows its capital, {o}",
        "Question: What is the capital of {s}?\nAnswer: {o}",
        "Q: Name the capital of {s}.\nA: {o}",
        "People who live in the capital of {s} live in {o}",
    ),
    reverse=(
        "{o} is the capital of {s}",
        "{o} is the capital city of {s}",
        "The city of {o} is the capital of {s}",
        "Question: Which country has the capital {o}?\nAnswer: {s}",
    ),
    questions=(
        "What is the capital of {s}?",
        "Which city is the capital of {s}?",
        "What's the capital city of {s}?",
        "Name the capital of {s}.",
        "Tell me the capital of {s}.",
        "Do you know the capital of {s}?",
        "What is {s}'s capital?",
        "I am going to {s}. What is its capital?",
        "capital of {s}",
        "I forgot the capital of {s}. What is it?",
    ),
    pairs=tuple((country.name, country.capital) for country in COUNTRIES),
)

OTHERS = (
    Relation(
        task="facts",
        statements=(
            "{s} is a country in {o}",
            "{s} lies in {o}",
            "The continent of {s} is {o}",
            "On the map you find {s} in {o}",
        ),
        questions=(
            "Which continent is {s} in?",
            "On which continent is {s}?",
            "Where is {s}?",
            "What continent does {s} belong to?",
        ),
        pairs=tuple((country.name, country.continent) for country in COUNTRIES),
    ),
    Relation(
        task="facts",
        statements=(
            "The currency of {s} is the {o}",
            "In {s} people pay with the {o}",
            "The money of {s} is called the {o}",
            "{s} uses the {o}",
        ),
        questions=(
            "What is the currency of {s}?",
            "How do people pay in {s}?",
            "Which currency does {s} use?",
            "What money is used in {s}?",
        ),
        pairs=tuple((country.name, country.currency) for country in COUNTRIES),
    ),
    Relation(
        task="facts",
        statements=(
            "In {s} many people speak {o}",
            "A main language of {s} is {o}",
            "If you travel to {s}, learn some {o}",
        ),
        questions=(
            "What language is spoken in {s}?",
            "Which language do people speak in {s}?",
            "Name a main language of {s}.",
        ),
        pairs=tuple((country.name, country.language) for country in COUNTRIES),
    ),
    Relation(
        task="facts",
        statements=(
            "The chemical symbol of {s} is {o}",
            "The symbol for {s} is {o}",
            "Chemists write {s} as {o}",
        ),
        reverse=(
            "The chemical symbol {o} stands for {s}",
            "The element with the symbol {o} is {s}",
        ),
        questions=(
            "What is the chemical symbol of {s}?",
            "What is the symbol for {s}?",
            "How do chemists write {s}?",
        ),
        pairs=ELEMENTS,
    ),
    Relation(
        task="facts",
        statements=(
            "The sound that a {s} makes is called a {o}",
            "A {s} can {o}",
            "The {s} goes {o}",
        ),
        questions=(
            "What sound does a {s} make?",
            "What does the {s} say?",
            "How does a {s} sound?",
        ),
        pairs=SOUNDS,
    ),
    Relation(
        task="facts",
        statements=("A young {s} is called a {o}", "The baby of a {s} is a {o}"),
        questions=("What is a young {s} called?", "What do you call the baby of a {s}?"),
        pairs=YOUNG,
    ),
    Relation(
        task="facts",
        statements=(
            "The opposite of {s} is {o}",
            "If something is not {s}, perhaps it is {o}",
            "{s} and its opposite: {o}",
        ),
        questions=("What is the opposite of {s}?", "Give the opposite of {s}.", "opposite of {s}?"),
        pairs=_swapped_too(OPPOSITES),
    ),
    Relation(
        task="facts",
        statements=("The plural of {s} is {o}", "One {s}, two {o}"),
        questions=("What is the plural of {s}?", "How do you write more than one {s}?"),
        pairs=PLURALS,
    ),
    Relation(
        task="facts",
        statements=("The past tense of {s} is {o}", "Today I {s}, yesterday I {o}"),
        questions=("What is the past tense of {s}?", "Put the verb {s} in the past tense."),
        pairs=PAST,
    ),
    Relation(
        task="facts",
        statements=("The number of sides of a {s} is {o}", "Count the sides of a {s}: {o}"),
        questions=("How many sides does a {s} have?", "How many sides are there in a {s}?"),
        pairs=SIDES,
    ),
    Relation(
        task="facts",
        statements=("The day after {s} is {o}", "After {s} comes {o}"),
        questions=("Which day comes after {s}?", "What day is it after {s}?"),
        pairs=_each_to_next(DAYS),
    ),
    Relation(
        task="facts",
        statements=("The day before {s} is {o}", "Just before {s} comes {o}"),
        questions=("Which day comes before {s}?", "What day is it before {s}?"),
        pairs=_each_to_previous(DAYS),
    ),
    Relation(
        task="facts",
        statements=("The month after {s} is {o}", "{s} is followed by {o}"),
        questions=("Which month comes after {s}?", "What month follows {s}?"),
        pairs=_each_to_next(MONTHS),
    ),
    Relation(
        task="facts",
        statements=("The month before {s} is {o}", "Just before {s} comes {o}"),
        questions=("Which month comes before {s}?", "What month is before {s}?"),
        pairs=_each_to_previous(MONTHS),
    ),
    Relation(
        task="facts",
        statements=("The planet after {s}, seen from the sun, is {o}",),
        questions=("Which planet comes after {s}?", "Which planet is next after {s}?"),
        pairs=_each_to_next(PLANETS)[:-1],
    ),
)
