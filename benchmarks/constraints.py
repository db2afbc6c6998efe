"""What masks cost: the time of a step with constrained rows and with free ones, in alternating
rounds.

    python benchmarks/constraints.py [MODEL] [--rows 1,8,32]

Each round answers the same prompts in one batch, free and then in a form that never ends, once with
a few tokens and once with many; a step's time is the difference, and what is left of the short run
is the start: the prompts, and a matcher for each row. The table has the medians. The default is the
bundled model; its steps are short, so that masks are a larger share of them than of a larger
model's.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

from cadenza import LLM, SamplingParams
from cadenza.structured import StructuredOutput

RECORDS = r"""start: record "," start
record: "{\"name\": " NAME ", \"age\": " NUMBER ", \"note\": " NOTE "}"
NAME: /"[A-Z][a-z]{2,12}"/
NUMBER: /[1-9][0-9]?/
NOTE: /"[^"\\\n]*"/
"""
PEOPLE = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "colour": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "age", "colour"],
        "additionalProperties": False,
    },
}
FORMS = {
    "schema": StructuredOutput(json=PEOPLE),
    "records": StructuredOutput(grammar=RECORDS),
    "lower case": StructuredOutput(grammar="start: /[a-z ,.]/ start"),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one batch of one round, in seconds."""

    start_s: float
    step_s: float


def elapsed_s(llm: LLM, rows: int, length: int, form: StructuredOutput | None) -> float:
    """Of one batch. Raises SystemExit if an answer is shorter."""
    params = SamplingParams(
        max_tokens=length, temperature=0.8, seed=1, ignore_eos=True, structured=form
    )
    prompts: list[Any] = [f"Write down number {index}." for index in range(rows)]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start_s
    found = [len(output.outputs[0].token_ids) for output in outputs]
    if set(found) != {length}:
        raise SystemExit(f"answers of {found} tokens in place of {length}")
    return elapsed


def time_steps(
    llm: LLM, rows: int, lengths: tuple[int, int], form: StructuredOutput | None
) -> Timing:
    few, many = (elapsed_s(llm, rows, length, form) for length in lengths)
    step_s = (many - few) / (lengths[1] - lengths[0])
    return Timing(few - lengths[0] * step_s, step_s)


def measure(llm: LLM, name: str, rows: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    timings: dict[bool, list[Timing]] = {True: [], False: []}
    for round_ in range(options.rounds + 1):
        for is_free in (True, False):
            form = None if is_free else FORMS[name]
            timing = time_steps(llm, rows, (options.length // 4, options.length), form)
            if round_:  # the first one compiles the grammar
                timings[is_free].append(timing)

    def median_ms(what: str, *, is_free: bool) -> float:
        return 1000 * statistics.median(getattr(each, what) for each in timings[is_free])

    free, constrained = (median_ms("step_s", is_free=each) for each in (True, False))
    starts = [median_ms("start_s", is_free=each) for each in (True, False)]
    shares = [
        100 * (masked.step_s / plain.step_s - 1)
        for plain, masked in zip(timings[True], timings[False], strict=True)
    ]
    return (
        f"{name:12} {rows:4} {free:10.2f} {constrained:12.2f} {statistics.median(shares):9.1f} "
        f"{starts[0]:10.0f} {starts[1]:12.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Constrained and free rows in alternating rounds.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    rows = [int(each) for each in options.rows.split(",")]
    with LLM(options.model, max_num_seqs=max(rows), max_model_len=512) as llm:
        print("                  ----------- ms a step -----------  ---- ms to start ----")
        print(
            "form         rows       free  constrained    more %       free  constrained",
            flush=True,
        )
        for name in FORMS:
            for each in rows:
                print(measure(llm, name, each, options), flush=True)


if __name__ == "__main__":
    main()
