"""Retrieval with OpenAI's client: find the passages that a question is about, and ask with them.

    cadenza serve &
    pip install openai
    python examples/rag.py http://127.0.0.1:8000 "Where do foxes sleep?" --passages notes.txt

One server does both: `/v1/embeddings` turns passages and the question into vectors of unit length,
so that a sum of products compares them, and chat answers from the nearest one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI

QUESTION = "What is the capital of Japan?"
PASSAGES = (
    "The capital of France is Paris.",
    "The capital of Japan is Tokyo.",
    "Foxes sleep in dens and hunt at dusk.",
    "Emma learned to swim in the lake.",
)
NUM_NEAREST = 1
BATCH = 64
"""Passages of one request; the server has them in one batch, whatever other requests it has."""

Vector = Sequence[float]


def main(arguments: list[str]) -> int:
    from openai import OpenAI

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--passages", type=Path, help="a file with one on each line")
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args(arguments)
    passages = PASSAGES if given.passages is None else lines_of(given.passages)
    with OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key) as client:
        found = nearest(client, passages, given.question)
        for passage in found:
            print(f"found: {passage}")
        print(f"answer: {answer(client, found, given.question)}")
    return 0


def lines_of(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def nearest(client: "OpenAI", passages: Sequence[str], question: str) -> list[str]:
    """The passages that are most like the question, the best first."""
    (asked,) = embed(client, [question])
    scores = [likeness(asked, vector) for vector in embed(client, passages)]
    order = sorted(range(len(passages)), key=lambda place: -scores[place])
    return [passages[place] for place in order[:NUM_NEAREST]]


def embed(client: "OpenAI", texts: Sequence[str]) -> list[Vector]:
    model = client.models.list().data[0].id
    found: list[Vector] = []
    for start in range(0, len(texts), BATCH):
        # A chat model's last state says what comes next, the mean of them what the text is about.
        answered = client.embeddings.create(
            model=model, input=list(texts[start : start + BATCH]), extra_body={"pooling": "mean"}
        )
        found += [each.embedding for each in answered.data]
    return found


def likeness(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def answer(client: "OpenAI", passages: Sequence[str], question: str) -> str:
    completion = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "\n".join([*passages, question])}],
        temperature=0,
        max_tokens=80,
    )
    return completion.choices[0].message.content or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
