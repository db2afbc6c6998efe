"""What masks cost: the time of a step with constrained rows and with free ones, in alternating
rounds.

    python benchmarks/constraints.py [MODEL] [--rows 1,8,32]
    python benchmarks/constraints.py --url http://127.0.0.1:8000 [--rows 1,8,32]

Each round answers the same prompts in one batch, free and then in a form that never ends, once with
a few tokens and once with many; a step's time is the difference, and what is left of the short run
is the start: the prompts, and a matcher for each row. The table has the medians. The default is the
bundled model; its steps are short, so that masks are a larger share of them than of a larger
model's. With `--url` a server that takes vLLM's `structured_outputs` answers instead, so that
Cadenza and vLLM can be compared.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

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


TIMEOUT_S = 600
Answer = Callable[[int, int, StructuredOutput | None], list[int]]
"""Answers (a number of prompts, tokens, form) in one batch; returns the tokens of each."""


def prompts_of(rows: int) -> list[str]:
    return [f"Write down number {index}." for index in range(rows)]


def answer_in_process(llm: LLM) -> Answer:
    def answer(rows: int, length: int, form: StructuredOutput | None) -> list[int]:
        params = SamplingParams(
            max_tokens=length, temperature=0.8, seed=1, ignore_eos=True, structured=form
        )
        prompts: list[Any] = prompts_of(rows)
        return [len(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]

    return answer


def answer_by_server(url: str) -> Answer:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def answer(rows: int, length: int, form: StructuredOutput | None) -> list[int]:
        body = {"model": model, "max_tokens": length, "temperature": 0.8, "seed": 1}
        body |= {"ignore_eos": True}
        if form is not None:
            members = msgspec.to_builtins(form).items()
            body["structured_outputs"] = {name: value for name, value in members if value}

        async def send_all() -> list[int]:
            limits = httpx.Limits(max_connections=rows)
            async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
                sent = [
                    client.post(f"{url}/v1/completions", json=body | {"prompt": prompt})
                    for prompt in prompts_of(rows)
                ]
                answers = [each.raise_for_status().json() for each in await asyncio.gather(*sent)]
            return [each["usage"]["completion_tokens"] for each in answers]

        return asyncio.run(send_all())

    return answer


def elapsed_s(answer: Answer, rows: int, length: int, form: StructuredOutput | None) -> float:
    """Of one batch. Raises SystemExit if an answer is shorter."""
    start_s = time.perf_counter()
    found = answer(rows, length, form)
    elapsed = time.perf_counter() - start_s
    if set(found) != {length}:
        raise SystemExit(f"answers of {found} tokens in place of {length}")
    return elapsed


def time_steps(
    answer: Answer, rows: int, lengths: tuple[int, int], form: StructuredOutput | None
) -> Timing:
    few, many = (elapsed_s(answer, rows, length, form) for length in lengths)
    step_s = (many - few) / (lengths[1] - lengths[0])
    return Timing(few - lengths[0] * step_s, step_s)


def measure(answer: Answer, name: str, rows: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    timings: dict[bool, list[Timing]] = {True: [], False: []}
    for round_ in range(options.rounds + 1):
        for is_free in (True, False):
            form = None if is_free else FORMS[name]
            timing = time_steps(answer, rows, (options.length // 4, options.length), form)
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
    parser.add_argument("--url", help="of a server; the model is the one that it serves")
    parser.add_argument("--forms", default=",".join(FORMS), help="which of them, by name")
    options = parser.parse_args()
    if options.url is not None and options.model is not None:
        parser.error("MODEL and --url exclude each other: a server has its own model")
    rows = [int(each) for each in options.rows.split(",")]
    with ExitStack() as stack:
        if options.url is not None:
            answer = answer_by_server(options.url.rstrip("/"))
        else:
            llm = LLM(options.model, max_num_seqs=max(rows), max_model_len=512)
            answer = answer_in_process(stack.enter_context(llm))
        print("                  ----------- ms a step -----------  ---- ms to start ----")
        print(
            "form         rows       free  constrained    more %       free  constrained",
            flush=True,
        )
        for name in options.forms.split(","):
            for each in rows:
                print(measure(answer, name, each, options), flush=True)


if __name__ == "__main__":
    main()
