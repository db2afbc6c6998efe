"""What default sampling is worth: how many answers to easy questions are right.

    python benchmarks/sampling_defaults.py [MODEL] [--seeds 25]

Each of six questions is asked through the chat template with every seed, once with the model's
default sampling (`--generation-config auto`) and once with neutral sampling (`none`: temperature 1,
no cuts). An answer is right if one of the question's words is in its first 48 tokens, as a word,
and none of the wrong ones comes before it. The answers of a seed are the same on every run of one
machine. Without MODEL it is the bundled one, which recommends temperature 0.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cadenza import LLM

MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Question:
    """`right` and `wrong` are regular expressions of words, without case."""

    text: str
    right: str
    wrong: str = r"(?!)"


QUESTIONS = (
    Question("What is the capital of France?", "paris"),
    Question("What is 2 + 2? Answer with a number.", "4|four", r"[0-35-9]\d*|\d{2,}"),
    Question("How many days are in a week?", "7|seven", r"[0-689]\d*|\d{2,}"),
    Question("What is the opposite of hot?", "cold|cool"),
    Question("Which planet do we live on?", "earth", "mars|venus|jupiter|mercury|saturn"),
    Question("What color is the sky on a clear day?", "blue", "red|green|yellow|black|orange"),
)


def is_right(question: Question, answer: str) -> bool:
    """Whether a right word comes, and no wrong one before it."""
    text = answer.lower()
    # The question's own numbers and words may be repeated.
    text = text.replace("2 + 2", "")
    right = re.search(rf"\b({question.right})\b", text)
    wrong = re.search(rf"\b({question.wrong})\b", text)
    return right is not None and (wrong is None or right.start() < wrong.start())


def count_right(llm: LLM, question: Question, seeds: int, neutral: Mapping[str, object]) -> int:
    messages = [{"role": "user", "content": question.text}]
    asked = [{"max_tokens": MAX_TOKENS, "seed": seed, **neutral} for seed in range(seeds)]
    outputs = llm.chat([messages] * seeds, asked)
    return sum(is_right(question, each.outputs[0].text) for each in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many answers to easy questions are right.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seeds", type=int, default=25)
    given = parser.parse_args()
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    totals = [0, 0]
    with LLM(given.model, max_num_seqs=16, max_model_len=512) as llm:
        defaults = llm.default_sampling_params
        shown = {name: getattr(defaults, name) for name in neutral}
        print(f"defaults: {shown}\n\n| question | neutral | default |\n|---|---|---|")
        for question in QUESTIONS:
            found = [count_right(llm, question, given.seeds, each) for each in (neutral, {})]
            totals = [total + count for total, count in zip(totals, found, strict=True)]
            print(f"| {question.text} | {found[0]} | {found[1]} |", flush=True)
    of = given.seeds * len(QUESTIONS)
    print(f"| all | {totals[0]} of {of} | {totals[1]} of {of} |")


if __name__ == "__main__":
    main()
