"""Drawn shapes: what an image shows, and the image.

Owns the kinds of shapes, the colours, how things are placed without overlap, and the drawing.
Knows no text.

Invariant: a scene is a function of its source; its image is a function of the scene.  Which scenes
are held out is decided by what they show (the background, and the set of colours with kinds).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw

from training.corpus.example import Source

KINDS = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 60),
    "blue": (35, 75, 215),
    "purple": (130, 45, 160),
    "brown": (120, 72, 35),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "grey": (140, 140, 140),
}
BACKGROUNDS = ("white", "white", "white", "black", "grey", "yellow", "blue", "green")
JITTER = 12
NUMBERS = (1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4)
LEAST_RADIUS, MOST_RADIUS = 0.12, 0.22
GAP = 0.02
MOST_TRIES = 200
SUPERSAMPLING = 2
SIDE = 96
"""Of the images that the model takes, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One shape; place and radius are parts of the image's side, angles are in radians."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What an image shows: things on a background of one colour."""

    background: str
    background_rgb: tuple[int, int, int]
    things: tuple[Thing, ...]

    @property
    def content(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What decides whether the scene is held out."""
        return self.background, tuple(sorted((each.colour, each.kind) for each in self.things))


def draw_scene(source: Source) -> Scene:
    """A scene on the source's side of the split."""
    background, pairs = source.draw(lambda: _content(source))
    placed: list[Thing] = []
    while len(placed) < len(pairs):
        placed = _place(source, pairs)
    return Scene(
        background=background,
        background_rgb=_jittered(source, background),
        things=tuple(placed),
    )


def _content(source: Source) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A background, and colours with kinds, sorted; a part of the scenes repeats one or both."""
    background = source.pick(BACKGROUNDS)
    number = source.pick(NUMBERS)
    kinds, colours = list(KINDS), [name for name in COLOURS if name != background]
    if source.chance(0.35):
        kinds = source.rng.sample(kinds, source.pick((1, 2)))
    if source.chance(0.25):
        colours = source.rng.sample(colours, source.pick((1, 2)))
    pairs = sorted((source.pick(colours), source.pick(kinds)) for _ in range(number))
    return background, tuple(pairs)


def _place(source: Source, pairs: tuple[tuple[str, str], ...]) -> list[Thing]:
    """Things that do not overlap; fewer than `pairs` if there was no room for one."""
    things: list[Thing] = []
    for colour, kind in source.rng.sample(pairs, len(pairs)):
        for _ in range(MOST_TRIES):
            radius = source.rng.uniform(LEAST_RADIUS, MOST_RADIUS)
            x, y = (source.rng.uniform(radius + GAP, 1 - radius - GAP) for _ in range(2))
            if all(
                math.hypot(x - each.x, y - each.y) > radius + each.radius + GAP for each in things
            ):
                things.append(
                    Thing(
                        kind=kind,
                        colour=colour,
                        x=x,
                        y=y,
                        radius=radius,
                        angle=source.rng.uniform(-0.25, 0.25),
                        rgb=_jittered(source, colour),
                    )
                )
                break
    return things


def _jittered(source: Source, colour: str) -> tuple[int, int, int]:
    red, green, blue = (
        min(255, max(0, value + source.rng.randint(-JITTER, JITTER))) for value in COLOURS[colour]
    )
    return red, green, blue


def draw_image(scene: Scene, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """The image of a scene in RGB, antialiased; sides that differ stretch it."""
    size = (width * SUPERSAMPLING, height * SUPERSAMPLING)
    image = Image.new("RGB", size, scene.background_rgb)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        _OUTLINES[thing.kind](_Pen(pen, scene.background_rgb, size, thing))
    return image.resize((width, height), Image.Resampling.BOX)


@dataclass(frozen=True, slots=True)
class _Pen:
    draw: ImageDraw.ImageDraw
    background: tuple[int, int, int]
    size: tuple[int, int]
    thing: Thing

    def polygon(self, corners: list[tuple[float, float]]) -> None:
        """Fills the polygon of corners around (0, 0), in radii, turned by the thing's angle."""
        thing, (width, height) = self.thing, self.size
        cosine, sine = math.cos(thing.angle), math.sin(thing.angle)
        self.draw.polygon(
            [
                (
                    (thing.x + thing.radius * (x * cosine - y * sine)) * width,
                    (thing.y + thing.radius * (x * sine + y * cosine)) * height,
                )
                for x, y in corners
            ],
            fill=thing.rgb,
        )

    def disc(self, radius: float, colour: tuple[int, int, int]) -> None:
        """Fills a disc of `radius` radii."""
        thing, (width, height) = self.thing, self.size
        reach = radius * thing.radius
        box = (
            (thing.x - reach) * width,
            (thing.y - reach) * height,
            (thing.x + reach) * width,
            (thing.y + reach) * height,
        )
        self.draw.ellipse(box, fill=colour)


def _circle(pen: _Pen) -> None:
    pen.disc(0.95, pen.thing.rgb)


def _ring(pen: _Pen) -> None:
    pen.disc(1.0, pen.thing.rgb)
    pen.disc(0.55, pen.background)


def _square(pen: _Pen) -> None:
    half = 0.8
    pen.polygon([(-half, -half), (half, -half), (half, half), (-half, half)])


def _triangle(pen: _Pen) -> None:
    pen.polygon([_at(angle, 1.0) for angle in (-90, 30, 150)])


def _star(pen: _Pen) -> None:
    pen.polygon([_at(36 * i - 90, 0.42 if i % 2 else 1.0) for i in range(10)])


def _cross(pen: _Pen) -> None:
    wide, arm = 0.95, 0.32
    pen.polygon([(-wide, -arm), (wide, -arm), (wide, arm), (-wide, arm)])
    pen.polygon([(-arm, -wide), (arm, -wide), (arm, wide), (-arm, wide)])


def _at(degrees: float, radius: float) -> tuple[float, float]:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


_OUTLINES: dict[str, Callable[[_Pen], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
}
