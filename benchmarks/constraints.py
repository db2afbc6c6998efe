"""What masks cost: tokens a second of constrained rows and of free ones, in alternating rounds.

    python benchmarks/constraints.py [MODEL] [--rows 1,8,32]

Each round answers the same prompts in one batch, free and then in a form that never ends, with
equal numbers of tokens; the table has the medians. The default is the bundled model; its steps
are short, so that masks are a larger share of them than of a larger model's.
"""

import argparse
import statistics
import time
from typing import Any

from cadenza import LLM, SamplingParams
from cadenza.structured import StructuredOutput

RECORDS = r"""start: record "," start
record: "{\"name\": " NAME ", \"age\": " NUMBER ", \"note\": " NOTE "}"
NAME: /"[A-Z][a-z]{2,12}"/
NUMBER: /[1-9][0-9]?/
NOTE: /"[^"\\\n]*"/
"""
FORMS = {
    "records": StructuredOutput(grammar=RECORDS),
    "lower case": StructuredOutput(grammar="start: /[a-z ,.]/ start"),
}


def tokens_per_s(llm: LLM, rows: int, length: int, form: StructuredOutput | None) -> float:
    """Of one batch. Raises SystemExit if an answer is shorter."""
    params = SamplingParams(
        max_tokens=length, temperature=0.8, seed=1, ignore_eos=True, structured=form
    )
    prompts: list[Any] = [f"Write down number {index}." for index in range(rows)]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed_s = time.perf_counter() - start_s
    found = [len(output.outputs[0].token_ids) for output in outputs]
    if set(found) != {length}:
        raise SystemExit(f"answers of {found} tokens in place of {length}")
    return rows * length / elapsed_s


def measure(llm: LLM, name: str, rows: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(options.rounds + 1):
        for is_free in (True, False):
            rate = tokens_per_s(llm, rows, options.length, None if is_free else FORMS[name])
            if round_:  # the first one compiles the grammar
                rates[is_free].append(rate)
    free, constrained = statistics.median(rates[True]), statistics.median(rates[False])
    step_ms = 1000 * rows / free
    cost_us = 1e6 / constrained - 1e6 / free
    return (
        f"{name:12} {rows:4} {free:9.1f} {constrained:12.1f} {step_ms:9.2f} {cost_us:12.1f} "
        f"{constrained / free:7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Constrained and free rows in alternating rounds.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=48)
    options = parser.parse_args()
    rows = [int(each) for each in options.rows.split(",")]
    with LLM(options.model, max_num_seqs=max(rows), max_model_len=512) as llm:
        print("form         rows  free t/s  constr. t/s   ms/step  us/row·step   ratio", flush=True)
        for name in FORMS:
            for each in rows:
                print(measure(llm, name, each, options), flush=True)


if __name__ == "__main__":
    main()
