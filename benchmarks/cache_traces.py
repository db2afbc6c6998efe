"""Traffic for a prefix cache: conversations, agents, batches, scans, and one after the other.

A trace is a function of its name and seed. Lengths are in tokens; a pool of 512 pages has 8,192.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

VOCAB_SIZE = 50_000

Tokens = list[int]
Lens = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and what it is answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """Conversations, of which `num_active` go on at a time: an ended one makes room for another.

    `stays` is the chance that the next turn is of the conversation of the last one. What is thought
    before an answer is not in the next turn.
    """

    num_active: int
    num_turns: Lens
    said: Lens
    answered: Lens
    thought: Lens = (0, 0)
    num_systems: int = 2
    system_len: int = 96
    stays: float = 0.0


CHATS = Talks(num_active=10, num_turns=(2, 8), said=(16, 96), answered=(32, 128))
MANY_CHATS = Talks(num_active=25, num_turns=(2, 8), said=(16, 96), answered=(32, 128))
THINKING = Talks(
    num_active=10, num_turns=(2, 8), said=(16, 96), answered=(32, 128), thought=(150, 600)
)
AGENTS = Talks(
    num_active=4,
    num_turns=(12, 30),
    said=(60, 300),
    answered=(20, 60),
    num_systems=1,
    system_len=512,
    stays=0.5,
)


def some(rng: random.Random, count: int) -> Tokens:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def talks(about: Talks, count: int, seed: int) -> Iterator[Ask]:
    rng = random.Random(f"{about} {seed}")
    systems = [some(rng, about.system_len) for _ in range(about.num_systems)]
    texts = [[*rng.choice(systems)] for _ in range(about.num_active)]
    left = [rng.randint(*about.num_turns) for _ in texts]
    at = 0
    for _ in range(count):
        if rng.random() >= about.stays:
            at = rng.randrange(len(texts))
        texts[at] += some(rng, rng.randint(*about.said))
        thought = some(rng, rng.randint(*about.thought))
        answer = some(rng, rng.randint(*about.answered))
        yield Ask(tuple(texts[at]), (*thought, *answer))
        texts[at] += answer
        left[at] -= 1
        if not left[at]:
            texts[at], left[at] = [*rng.choice(systems)], rng.randint(*about.num_turns)


def in_turn(num_talks: int, num_turns: int, seed: int) -> Iterator[Ask]:
    """Three conversations at a time, one turn of each after the other."""
    rng = random.Random(f"in turn {seed}")
    for _ in range(num_talks // 3):
        texts: list[Tokens] = [[], [], []]
        for _ in range(num_turns):
            for text in texts:
                text.extend(some(rng, rng.randint(24, 64)))
                answer = some(rng, rng.randint(24, 64))
                yield Ask(tuple(text), tuple(answer))
                text.extend(answer)


def batch(count: int, seed: int) -> Iterator[Ask]:
    """Behind one system prompt."""
    rng = random.Random(f"batch {seed}")
    system = some(rng, 512)
    for _ in range(count):
        own = some(rng, rng.randint(40, 160))
        yield Ask((*system, *own), tuple(some(rng, rng.randint(16, 64))))


def scan(count: int, seed: int) -> Iterator[Ask]:
    """Prompts that come once."""
    rng = random.Random(f"scan {seed}")
    for _ in range(count):
        yield Ask(tuple(some(rng, rng.randint(200, 800))), tuple(some(rng, 32)))


def documents(count: int, seed: int) -> Iterator[Ask]:
    """Questions behind forty documents; the second is asked about half as often as the first."""
    rng = random.Random(f"documents {seed}")
    texts = [some(rng, rng.randint(300, 900)) for _ in range(40)]
    weights = [1 / (place + 1) for place in range(len(texts))]
    for _ in range(count):
        (text,) = rng.choices(texts, weights)
        yield Ask((*text, *some(rng, rng.randint(16, 64))), tuple(some(rng, 48)))


def asked_twice(count: int, seed: int) -> Iterator[Ask]:
    rng = random.Random(f"twice {seed}")
    for _ in range(count):
        prompt = tuple(some(rng, rng.randint(40, 100)))
        for _ in range(2):
            yield Ask(prompt, tuple(some(rng, 16)))


def mixed(seed: int, *parts: tuple[int, Iterable[Ask]]) -> Iterator[Ask]:
    """By chance, each part so often as its weight says, until one ends."""
    rng = random.Random(f"mixed {seed}")
    weights = [weight for weight, _ in parts]
    sources = [iter(part) for _, part in parts]
    while True:
        (source,) = rng.choices(sources, weights)
        ask = next(source, None)
        if ask is None:
            return
        yield ask


TRACES: dict[str, Callable[[int], Iterable[Ask]]] = {
    "ten chats": lambda seed: talks(CHATS, 1000, seed),
    "25 chats": lambda seed: talks(MANY_CHATS, 1200, seed),
    "ten chats with thoughts, which do not come back": lambda seed: talks(THINKING, 800, seed),
    "four agents": lambda seed: talks(AGENTS, 600, seed),
    "a batch behind one system prompt": lambda seed: batch(500, seed),
    "one request of a batch to four of a scan": lambda seed: mixed(
        seed, (1, batch(500, seed)), (4, scan(500, seed))
    ),
    "questions about forty documents": lambda seed: documents(1000, seed),
    "chats and a scan": lambda seed: mixed(
        seed, (3, talks(CHATS, 900, seed)), (1, scan(300, seed))
    ),
    "chats and documents": lambda seed: mixed(
        seed, (1, talks(CHATS, 500, seed)), (1, documents(500, seed))
    ),
    "agents, a batch and a scan": lambda seed: mixed(
        seed, (1, talks(AGENTS, 400, seed)), (2, batch(800, seed)), (1, scan(400, seed))
    ),
    "prompts asked twice, then three conversations in turn": lambda seed: chain(
        asked_twice(200, seed), in_turn(30, 6, seed)
    ),
    "prompts asked twice, then chats": lambda seed: chain(
        asked_twice(300, seed), talks(CHATS, 400, seed)
    ),
    "chats, then documents": lambda seed: chain(talks(CHATS, 600, seed), documents(400, seed)),
}
