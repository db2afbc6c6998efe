"""Tokens a second with drafts and without, in one engine, in alternating rounds.

    python benchmarks/speculation.py [MODEL] [--method ngram|mtp|quantised|draft_model]
        [--draft MODEL]

Each round answers the same greedy requests with `speculative` unset and with `speculative: false`;
the table has the medians, and the answers must be equal. Two tasks: a copying one, which repeats a
text with a change, and a free one. The default is the bundled model with `ngram`.
"""

import argparse
import statistics
import time
from typing import Any

from cadenza import LLM

CODE = """def mean(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)


def variance(numbers):
    middle = mean(numbers)
    total = 0
    for number in numbers:
        total = total + (number - middle) * (number - middle)
    return total / len(numbers)
"""
TASKS = {
    "edit": f"Rename `total` to `result` in this code and repeat all of it:\n\n{CODE}",
    "free": "Explain in some detail how a bicycle stays upright.",
}


def answer(
    llm: LLM, prompts: list[Any], options: argparse.Namespace, *, drafts: bool
) -> tuple[float, list[Any]]:
    """Tokens a second, and the answers."""
    params = {
        "max_tokens": options.length,
        "temperature": 0.0,
        "ignore_eos": True,
        "speculative": None if drafts else False,
    }
    clock = time.process_time if options.processor_time else time.perf_counter
    start_s = clock()
    outputs = llm.chat(prompts, params)
    elapsed_s = clock() - start_s
    ids = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, ids)) / elapsed_s, ids


def measure(llm: LLM, task: str, rows: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    prompts = [
        [{"role": "user", "content": f"{TASKS[task]}\n\n({index + 1})"}] for index in range(rows)
    ]
    answer(llm, prompts, options, drafts=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    counts = llm.core.scheduler.draft_counts
    before = counts.num_accepted_tokens, counts.num_draft_tokens
    for _ in range(options.rounds):
        found = {}
        for drafts in (True, False):
            rate, found[drafts] = answer(llm, prompts, options, drafts=drafts)
            rates[drafts].append(rate)
        if found[True] != found[False]:
            raise SystemExit("the answers differ")
    accepted = counts.num_accepted_tokens - before[0]
    drafted = counts.num_draft_tokens - before[1]
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    share = accepted / drafted if drafted else 0.0
    return (
        f"{task:6} {rows:4} {off:9.1f} {on:9.1f} {on / off:7.2f} {share:10.2f} "
        f"{accepted / (options.rounds * options.length * rows):12.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafts on and off, in alternating rounds.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="tokens a second of processor time, for a machine that does other work, too; "
        "with CADENZA_NUM_THREADS=1, since threads that wait for another use the processor",
    )
    options = parser.parse_args()
    config = {"method": options.method}
    if options.draft is not None:
        config["model"] = options.draft
    rows = [int(each) for each in options.rows.split(",")]
    with LLM(
        options.model, max_num_seqs=max(rows), max_model_len=1024, speculative_config=config
    ) as llm:
        print("task   rows   off t/s    on t/s   ratio   accepted   of all tokens", flush=True)
        for task in TASKS:
            for each in rows:
                print(measure(llm, task, each, options), flush=True)


if __name__ == "__main__":
    main()
