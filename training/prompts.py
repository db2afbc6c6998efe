"""Writes `prompts.json`: 200 prompts whose greedy text is compared with other engines.

Run as `python -m training.prompts` from the root of the repository.
"""

from pathlib import Path

from training.corpus.example import Example, Source, Split
from training.corpus.lookup import lookup_of_length
from training.corpus.mixture import SHARES, make_example, open_source
from training.train import write_json

PROMPTS_PATH = Path(__file__).parent / "prompts.json"
OF_EACH_TASK = 24
MAX_TOKENS = 200
LOOKUP_TOKENS = (100, 200, 400, 600, 900, 1200, 1500, 1800)
STORY_WORDS = (3, 8, 16, 24)


def make_prompts() -> list[dict[str, str]]:
    prompts = [
        {"task": task, "prompt": _prompt(task, index)}
        for task in SHARES
        for index in range(OF_EACH_TASK)
    ]
    for tokens in LOOKUP_TOKENS:
        example = lookup_of_length(_source("long", tokens), tokens)
        prompts.append({"task": "lookup", "prompt": example.prompt})
    return prompts


def _source(*key: object) -> Source:
    return open_source(Split.HELD_OUT, "prompts", *key)


def _prompt(task: str, index: int) -> str:
    return prompt_of(make_example(task, _source(task, index), max_tokens=MAX_TOKENS), index)


def prompt_of(example: Example, index: int) -> str:
    """The text up to its answer; of a story, its first words, in a number that `index` chooses."""
    if example.answer is not None:
        return example.prompt
    return " ".join(example.text.split(" ")[: STORY_WORDS[index % len(STORY_WORDS)]])


if __name__ == "__main__":
    write_json(PROMPTS_PATH, make_prompts())
