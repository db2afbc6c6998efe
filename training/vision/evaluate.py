"""Measures the exported model that sees on held-out images: exact match of each task's answers.

An answer matches exactly if greedy decoding generates it and ends.  That is equivalent to each of
its tokens being the most likely one after the preceding tokens, so one forward pass over prompt
and answer is enough.

Run as `python -m training.vision.evaluate` from the root of the repository.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from training.corpus.example import Source, Split
from training.corpus.mixture import open_source
from training.model import Weights
from training.train import write_json
from training.vision.dialogues import NUM_ROWS, Dialogue, pack
from training.vision.exported import load_seeing
from training.vision.model import Batch, as_batch, forward_seeing
from training.vision.questions import SHARES, ask, of_two, without_image
from training.vision.scenes import Scene, draw_scene
from training.vision.shape import TEXT_SHAPE, TowerShape
from training.vision.tokenizer import BUNDLED_VISION, load_vision_tokenizer

RESULTS_PATH = Path(__file__).parent / "results.json"


def dialogue_of(task: str, source: Source) -> Dialogue:
    """One turn of a task, about a held-out image."""
    dialogue = Dialogue()
    if task == "no image":
        dialogue.add(without_image(source))
    elif task == "two images":
        scenes = draw_scene(source), draw_scene(source)
        dialogue.add(of_two(source, scenes), scenes)
    else:
        scene, question = scene_with(task, source)
        dialogue.add(question, [scene])
    return dialogue


def scene_with(task: str, source: Source) -> tuple[Scene, Any]:
    """A scene that answers a question of the task, and the question."""
    while True:
        scene = draw_scene(source)
        question = ask(source, scene, [task])
        if question.task == task:
            return scene, question


def second_turn(source: Source) -> Dialogue:
    """A question about the image of the turn before; the last answer counts."""
    dialogue, scene = Dialogue(), draw_scene(source)
    dialogue.add(ask(source, scene), [scene])
    dialogue.add(ask(source, scene))
    del dialogue.learned[0]
    return dialogue


def measure(weights: Weights, number: int) -> dict[str, Any]:
    """The share of exact matches by task, of `number` dialogues each."""
    tokenizer = load_vision_tokenizer()
    makers: dict[str, Callable[[Source], Dialogue]] = {
        task: functools.partial(dialogue_of, task) for task in (*SHARES, "two images", "no image")
    }
    makers["second turn"] = second_turn
    found = {}
    for task, make in makers.items():
        source = open_source(Split.HELD_OUT, "evaluate images", task)
        matches: list[bool] = []
        while len(matches) < number:
            dialogues = [make(source) for _ in range(NUM_ROWS // 2)]
            batch = pack(tokenizer, dialogues, source)
            matches += _matches(weights, as_batch(batch))
        found[task] = {
            "examples": len(matches),
            "exact_match": round(sum(matches) / len(matches), 4),
        }
        print(task, found[task], flush=True)
    return found


def _matches(weights: Weights, batch: Batch) -> list[bool]:
    """For each row: whether all learned tokens are the most likely ones."""
    likeliest = np.asarray(_likeliest(weights, batch))
    following = np.asarray(batch["token_ids"])[:, 1:]
    learned = np.asarray(batch["weights"])[:, 1:] > 0
    return [bool(each) for each in ((likeliest == following) | ~learned).all(axis=1)]


@jax.jit
def _likeliest(weights: Weights, batch: Batch) -> jax.Array:
    logits, _ = forward_seeing(weights, batch, TEXT_SHAPE, TowerShape())
    return jnp.argmax(logits[:, :-1], axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=BUNDLED_VISION)
    parser.add_argument("--number", type=int, default=500, help="dialogues of each task")
    parser.add_argument("--results", type=Path, default=RESULTS_PATH)
    arguments = parser.parse_args()
    weights = load_seeing(arguments.folder, TEXT_SHAPE, TowerShape())
    write_json(arguments.results, {"tasks": measure(weights, arguments.number)})


if __name__ == "__main__":
    main()
