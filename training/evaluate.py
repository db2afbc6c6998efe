"""Measures the bundled checkpoint on held-out examples: loss and exact match for each task, and
how many drafts of its drafters are accepted (`training.acceptance`).

An answer matches exactly if greedy decoding generates it.  That is equivalent to each
token of the answer being the most likely one after the preceding tokens, so one forward
pass over prompt and answer is enough.

Run as `python -m training.evaluate` from the root of the repository.
"""

import argparse
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from training.acceptance import acceptance_of
from training.batches import EncodedExample, encode
from training.corpus.arithmetic import Problem
from training.corpus.countries import COUNTRIES
from training.corpus.dialogues import dialogue_of_turns
from training.corpus.example import Example, Source, Split, completion
from training.corpus.lookup import lookup_of_length
from training.corpus.mixture import SHARES, make_example, open_source
from training.export import BUNDLED_DRAFT
from training.exported import load_exported
from training.model import ModelShape, Weights, forward
from training.tokenizer import BUNDLED, load_tokenizer
from training.train import load_weights, write_json

RESULTS_PATH = Path(__file__).parent / "results.json"
MAX_TOKENS = 400
ROW_LENGTHS = (128, 512, 2048)
TOKENS_OF_A_BATCH = 4096
WITHOUT_ONE_ANSWER = ("stories",)
DIALOGUE_TURNS = (2, 5, 10)
LOOKUP_LENGTHS = (100, 250, 500, 1000, 1500, 1850)


@dataclass(frozen=True, slots=True)
class Score:
    """One example's loss (nats), number of learned tokens, and whether its answer matches."""

    task: str
    loss: float
    num_tokens: int
    is_exact: bool | None


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores examples under one set of weights."""

    weights: Weights
    tokenizer: Tokenizer
    shape: ModelShape

    def score(self, examples: list[Example]) -> list[Score]:
        """Scores, in an order of their own, of the examples that fit into the context."""
        waiting: dict[int, list[Example]] = {length: [] for length in ROW_LENGTHS}
        for example in examples:
            size = len(self.tokenizer.encode(example.text).ids)
            fits = [length for length in ROW_LENGTHS if size <= length]
            if fits:
                waiting[fits[0]].append(example)
        scores = []
        for length, group in waiting.items():
            rows = TOKENS_OF_A_BATCH // length
            for start in range(0, len(group), rows):
                scores += self._score_batch(group[start : start + rows], length)
        return scores

    def _score_batch(self, examples: list[Example], length: int) -> list[Score]:
        encoded = [encode(self.tokenizer, example) for example in examples]
        token_ids = np.zeros((TOKENS_OF_A_BATCH // length, length), np.int32)
        for row, example in enumerate(encoded):
            token_ids[row, : len(example.token_ids)] = example.token_ids
        losses, is_likeliest = _judge_tokens(self.weights, jnp.asarray(token_ids), self.shape)
        losses, is_likeliest = np.asarray(losses), np.asarray(is_likeliest)
        return [
            self._score_row(example, tokens, losses[row], is_likeliest[row])
            for row, (example, tokens) in enumerate(zip(examples, encoded, strict=True))
        ]

    def _score_row(
        self, example: Example, tokens: EncodedExample, losses: np.ndarray, likeliest: np.ndarray
    ) -> Score:
        """`losses` and `likeliest` `[T - 1]` are about the tokens from the second on."""
        learned = np.array(tokens.weights[1:], bool)
        row_losses = losses[: len(learned)][learned]
        is_exact = None
        if example.answer is not None and example.task not in WITHOUT_ONE_ANSWER:
            offsets = self.tokenizer.encode(example.text).offsets
            start, end = example.answer
            answer = [i - 1 for i, (_, last) in enumerate(offsets) if start < last <= end]
            is_exact = bool(likeliest[answer].all())
        return Score(example.task, float(row_losses.sum()), len(row_losses), is_exact)


def held_out_examples(tokens: int, number: int) -> list[Example]:
    return [
        make_example(task, open_source(Split.HELD_OUT, "evaluate", task, i), max_tokens=tokens)
        for task in SHARES
        for i in range(number)
    ]


def capital_examples() -> list[Example]:
    """Each capital in the simplest phrasing; most of these were in the training data."""
    return [
        completion("plain capitals", f"The capital of {country.name} is", f" {country.capital}")
        for country in COUNTRIES
    ]


def addition_examples(digits: int, number: int) -> list[Example]:
    """Sums of two held-out numbers with exactly the given number of digits."""
    source = open_source(Split.HELD_OUT, "addition", digits)
    least, most = 10 ** (digits - 1), 10**digits - 1
    examples = []
    for _ in range(number):
        problem = source.draw(
            lambda: Problem(source.rng.randint(least, most), "+", source.rng.randint(least, most))
        )
        prompt, answer = f"{problem.left_side} =", f" {problem.result}\n"
        examples.append(completion(f"{digits}-digit sums", prompt, answer))
    return examples


def summary(scores: list[Score]) -> dict[str, Any]:
    matches = [score.is_exact for score in scores if score.is_exact is not None]
    num_tokens = sum(score.num_tokens for score in scores)
    result: dict[str, Any] = {
        "examples": len(scores),
        "loss": round(sum(score.loss for score in scores) / num_tokens, 4),
    }
    if matches:
        result["exact_match"] = round(sum(matches) / len(matches), 4)
    return result


def evaluate(judge: Judge, number: int) -> dict[str, Any]:
    scores = judge.score(held_out_examples(MAX_TOKENS, number))
    by_task = {task: [score for score in scores if score.task == task] for task in SHARES}
    return {
        "held_out_loss": summary(scores)["loss"],
        "tasks": {task: summary(task_scores) for task, task_scores in by_task.items()},
        "plain_capitals": summary(judge.score(capital_examples())),
        "sums_by_digits": {
            str(digits): summary(judge.score(addition_examples(digits, number)))
            for digits in (1, 2, 3)
        },
        "dialogue_by_turns": _by_size(judge, "dialogue", dialogue_of_turns, DIALOGUE_TURNS, number),
        "lookup_by_tokens": _by_size(judge, "lookup", lookup_of_length, LOOKUP_LENGTHS, number),
    }


def _by_size(
    judge: Judge,
    name: str,
    make: Callable[[Source, int], Example],
    sizes: Iterable[int],
    number: int,
) -> dict[str, Any]:
    """Summaries of held-out examples at each size, a quarter of `number` but at least 20."""
    summaries = {}
    for size in sizes:
        source = open_source(Split.HELD_OUT, name, size)
        examples = [make(source, size) for _ in range(max(20, number // 4))]
        summaries[str(size)] = summary(judge.score(examples))
    return summaries


@functools.partial(jax.jit, static_argnames="shape")
def _judge_tokens(
    weights: Weights, token_ids: jax.Array, shape: ModelShape
) -> tuple[jax.Array, jax.Array]:
    """For each token from the second on: its loss, and whether it is the most likely one."""
    logits = forward(weights, token_ids, jnp.zeros_like(token_ids), shape=shape)[:, :-1]
    targets = token_ids[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, jnp.argmax(logits, axis=-1) == targets


def sample(judge: Judge, prompt: str, *, temperature: float, seed: int, most: int = 200) -> str:
    """Samples a continuation of the prompt without a KV cache; slow, for inspection only."""
    token_ids = judge.tokenizer.encode(prompt).ids
    num_prompt_tokens = len(token_ids)
    stops = {judge.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    choose = _chooser(temperature, seed)
    while len(token_ids) < num_prompt_tokens + most:
        length = -(-(len(token_ids) + 1) // 128) * 128
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(token_ids)] = token_ids
        logits = _logits(judge.weights, jnp.asarray(padded), judge.shape)
        token_id = choose(np.asarray(logits[0, len(token_ids) - 1]))
        if token_id in stops:
            break
        token_ids.append(token_id)
    return judge.tokenizer.decode(token_ids[num_prompt_tokens:], skip_special_tokens=False)


def _chooser(temperature: float, seed: int) -> Callable[[np.ndarray], int]:
    chance = np.random.default_rng(seed)

    def choose(logits: np.ndarray) -> int:
        if temperature == 0:
            return int(logits.argmax())
        return int((logits / temperature + chance.gumbel(size=logits.shape)).argmax())

    return choose


@functools.partial(jax.jit, static_argnames="shape")
def _logits(weights: Weights, token_ids: jax.Array, shape: ModelShape) -> jax.Array:
    return forward(weights, token_ids, jnp.zeros_like(token_ids), shape=shape)


def load_judge(folder: Path = BUNDLED) -> Judge:
    shape = ModelShape()
    return Judge(load_exported(folder, shape), load_tokenizer(), shape)


def load_run_judge(folder: Path) -> Judge:
    """Judges the last checkpoint of a run, in float32, before it is exported."""
    shape = ModelShape()
    return Judge(load_weights(folder, shape), load_tokenizer(), shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=400, help="examples of each task")
    parser.add_argument("--results", type=Path, default=RESULTS_PATH)
    parser.add_argument("--run", type=Path, help="folder of a run to measure instead")
    arguments = parser.parse_args()
    if arguments.run:
        results = evaluate(load_run_judge(arguments.run), arguments.number)
    else:
        results = evaluate(load_judge(), arguments.number)
        results["acceptance"] = acceptance_of(BUNDLED, BUNDLED_DRAFT, arguments.number // 4)
    write_json(arguments.results, results)


if __name__ == "__main__":
    main()
