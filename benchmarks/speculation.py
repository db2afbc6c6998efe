"""Tokens a second with drafts and without, in one engine, in alternating rounds.

    python benchmarks/speculation.py [MODEL] [--method ngram|mtp|quantised|draft_model]
        [--draft MODEL]
    python benchmarks/speculation.py --shape llama-3.2-1b --acceptance 0.6,0.8
    python benchmarks/speculation.py --acceptance

Each round answers the same greedy requests with `speculative` unset and with `speculative: false`;
the table has the medians, also of the ratios, and the answers must be equal. Three tasks: a copying
one, which repeats a text with a change, a summary, and a free one. The default is the bundled model
with `ngram`.

With `--acceptance` alone, no drafts are made up: for the MTP layer of a model, the bundled one by
default, it prints the share of drafts that must be accepted for them to save time, by the weights'
format and the number of rows, from the times of steps and of drafts measured now; above 100 % they
cannot. Beside it stands the share of the model's own drafts that are accepted, one in each step.

With `--acceptance CHANCES` the drafts are made up: each is the token that the model chooses there
with such a chance, and costs nothing. Random weights of a shape then show what verifying is worth.
Beside the ratio stands the best one that the measured costs of steps allow. With the method of a
second model that model drafts, too, at its own cost, which the best one leaves out, and each of its
drafts is exchanged for a made-up one: `--method quantised --shape llama-3.2-1b --acceptance 0.93`.

With `--hopeless` all made-up drafts are wrong, and rows may change: `1+16+1` is one stream, then
16, then one. What it costs to find out that drafts do not pay is the ratio's distance from one.
`--draft-shape` has a second model of random weights draft: `--hopeless --shape smollm2-135m
--method draft_model --draft-shape smollm2-135m`. With `--own-drafts` its drafts stay as they are:
those of the target's own shape are all right and as dear as what they save.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

from cadenza import LLM, Request, SamplingParams, Token
from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.config import EngineConfig
from cadenza.drafting.drafts import Drafting
from cadenza.engine.calibration import measure_decode_ms
from cadenza.engine.core import EngineCore
from cadenza.engine.model_drafter import ModelDrafter
from cadenza.loading.build import cache_folder, load_runners, open_planned
from cadenza.scheduler.draft_costs import DraftCosts
from cadenza.scheduler.step_drafts import DraftSlot, DraftStep, StepDrafts

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
REPORT = """The harbour of Lindvik was closed for three days last week. A storm had torn the larger
of its two cranes from its rails, and nobody could say how soon it would stand again. Fishing boats
were sent to the neighbouring harbour of Osmund, where the ice for their catch was sold out by noon.
The ferry to the islands kept its timetable, since it does not depend on the cranes. On Friday the
smaller crane was tested and found to be safe. The harbour master expects that container ships can
be unloaded again from Monday, at half the usual speed, and that the larger crane will be repaired
by the end of the month.
"""
TASKS = {
    "edit": f"Rename `total` to `result` in this code and repeat all of it:\n\n{CODE}",
    "summary": f"Summarise this text in a few of its own sentences:\n\n{REPORT}",
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


def ratio_of(rates: dict[bool, list[float]]) -> float:
    """The median of those of the rounds: a machine that becomes slower is so for both parts."""
    return statistics.median(on / off for on, off in zip(rates[True], rates[False], strict=True))


def measure(llm: LLM, task: str, rows: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    prompts = [
        [{"role": "user", "content": f"{TASKS[task]}\n\n({index + 1})"}] for index in range(rows)
    ]
    answer(llm, prompts, options, drafts=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    counts = llm.core.draft_counts
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
        f"{task:7} {rows:4} {off:9.1f} {on:9.1f} {ratio_of(rates):7.2f} {share:10.2f} "
        f"{accepted / (options.rounds * options.length * rows):12.2f}"
    )


@dataclass(frozen=True, slots=True)
class MadeUpDrafts:
    """A `DraftSource` that knows the answer to a prompt, and is right with a chance of
    `acceptance`."""

    num_prompt_tokens: int
    answer: Sequence[int]
    acceptance: float
    rng: random.Random

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        at = len(token_ids) - self.num_prompt_tokens
        coming = self.answer[at : at + most]
        return [each if self.rng.random() < self.acceptance else each ^ 1 for each in coming]


def made_up(sources: dict[tuple[int, ...], MadeUpDrafts]) -> AbstractContextManager[Any]:
    """Meanwhile a second model drafts as it does, and what it drew is exchanged for what `sources`
    have for each prompt."""
    propose = ModelDrafter.propose

    def exchanged(drafter: ModelDrafter, slots: Sequence[DraftSlot], step: DraftStep) -> None:
        propose(drafter, slots, step)
        for entry in [slot.entry for slot in slots if slot.entry.drafts]:
            source = sources.get(tuple(entry.sequence.request.prompt_token_ids))
            if source is None:
                continue
            drafts = source.propose(entry.sequence.token_ids, len(entry.drafts))
            entry.drafts = tuple(drafts)

    return patch.object(ModelDrafter, "propose", exchanged)


def answer_with(
    core: EngineCore, prompts: list[tuple[int, ...]], length: int, sources: list[MadeUpDrafts]
) -> tuple[float, list[list[int]]]:
    """Tokens a second behind the first ones, and the answers; without drafts if there are no
    `sources`."""
    params = SamplingParams(
        max_tokens=length, temperature=0.0, ignore_eos=True, speculative=bool(sources)
    )
    ids = [core.submit(Request(prompt_token_ids=each, params=params)) for each in prompts]
    for sequence, source in zip(core.scheduler.waiting, sources, strict=False):
        if sequence.drafting is not None and sequence.drafting.source is not None:
            sequence.drafting.source = source
    found: dict[int, list[int]] = {each: [] for each in ids}
    start_s = time.perf_counter()
    num_before = 0
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, Token):
                found[event.request_id].append(event.token_id)
        if not num_before and all(found.values()):
            start_s, num_before = time.perf_counter(), sum(map(len, found.values()))
    elapsed_s = time.perf_counter() - start_s
    return (sum(map(len, found.values())) - num_before) / elapsed_s, [found[each] for each in ids]


def best_ratio(cost: StepCost, acceptance: float, rows: int, num_keys: int, most: int) -> float:
    """What the costs of steps allow: the best of all numbers of drafts."""

    def rate(num_drafts: int) -> float:
        count = rows * (1 + num_drafts)
        load = StepLoad(num_tokens=count, num_logits=count, num_keys=count * num_keys)
        gained = sum(acceptance**place for place in range(num_drafts + 1))
        return gained * rows / cost.predict_ms(load)

    return max(map(rate, range(most + 1))) / rate(0)


def measure_made_up(llm: LLM, acceptance: float, rows: int, options: argparse.Namespace) -> str:
    """One line of the table of made-up drafts."""
    core, rng = llm.core, random.Random(f"{acceptance} {rows}")
    prompts = [tuple(rng.choices(range(1000), k=options.prompt_tokens)) for _ in range(rows)]
    _, answers = answer_with(core, prompts, options.length, [])
    rates: dict[bool, list[float]] = {True: [], False: []}
    counts = core.draft_counts
    before = counts.num_accepted_tokens, counts.num_draft_tokens
    for _ in range(options.rounds):
        for drafts in (True, False):
            sources = [
                MadeUpDrafts(options.prompt_tokens, each, acceptance, rng) for each in answers
            ]
            with made_up(dict(zip(prompts, sources, strict=True))):
                rate, found = answer_with(core, prompts, options.length, sources if drafts else [])
            rates[drafts].append(rate)
            if found != answers:
                raise SystemExit("the answers differ")
    accepted = counts.num_accepted_tokens - before[0]
    drafted = counts.num_draft_tokens - before[1]
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    cost = core.scheduler.times.cost
    assert cost is not None
    best = best_ratio(
        cost, acceptance, rows, options.prompt_tokens + options.length // 2, options.most
    )
    return (
        f"{acceptance:10.2f} {rows:4} {off:9.1f} {on:9.1f} {ratio_of(rates):7.2f} {best:7.2f} "
        f"{accepted / max(1, drafted):10.2f} "
        f"{accepted / (options.rounds * options.length * rows):12.2f}"
    )


def measure_hopeless(llm: LLM, load: str, options: argparse.Namespace) -> str:
    """One line of the table of drafts that do not pay; `load` has numbers of rows, one after the
    other."""
    rng = random.Random(load)
    phases = [
        [tuple(rng.choices(range(1000), k=options.prompt_tokens)) for _ in range(int(rows))]
        for rows in load.split("+")
    ]
    answers = [answer_with(llm.core, each, options.length, [])[1] for each in phases]
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * options.rounds):
        drafts = number % 4 in (0, 3)  # whoever is first is so every second time only
        seconds = 0.0
        for prompts, expected in zip(phases, answers, strict=True):
            sources = [MadeUpDrafts(options.prompt_tokens, each, 0.0, rng) for each in expected]
            exchanged = {} if options.own_drafts else dict(zip(prompts, sources, strict=True))
            with made_up(exchanged):
                rate, found = answer_with(
                    llm.core, prompts, options.length, sources if drafts else []
                )
            if found != expected:
                raise SystemExit("the answers differ")
            seconds += len(prompts) * options.length / rate
        rates[drafts].append(sum(map(len, phases)) * options.length / seconds)
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    return f"{load:8} {off:9.1f} {on:9.1f} {ratio_of(rates):7.3f}"


FORMATS = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
"""What `quantization` is for each: of weights that are stored as bfloat16."""

TABLE_ROWS = (1, 2, 4, 8, 16)
MOST_LOGITS = 64
"""Of a step: so many drafts and newest tokens are tried at most."""


ANSWERS = 8
"""To each task, from which the acceptance of the model's own drafts is taken."""


def break_even(
    steps_ms: Mapping[int, float], draft_ms: float, num_rows: int, most: int
) -> tuple[float, int]:
    """The least acceptance at which drafts give as many tokens a second as none do, and the number
    of drafts of each row for which that is so. Above 1 there is none.

    Args:
        steps_ms: of steps with so many tokens, each with logits.
        draft_ms: of a step that draws one draft of each row.
        most: drafts of each row; numbers that `steps_ms` lacks are left out.
    """
    found: list[tuple[float, int]] = []
    for number in range(1, most + 1):
        step_ms = steps_ms.get(num_rows * (1 + number))
        if step_ms is not None:
            ratio = (step_ms + number * draft_ms) / steps_ms[num_rows]
            found.append((acceptance_of(ratio, number), number))
    return min(found)


def acceptance_of(num_tokens: float, num_drafts: int) -> float:
    """At which a step with so many drafts of a row is expected to give so many tokens of it."""
    low, high = 0.0, max(1.0, num_tokens)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(num_drafts + 1)) < num_tokens:
            low = middle
        else:
            high = middle
    return high if low else 0.0


def measure_break_even(name: str, options: argparse.Namespace) -> list[str]:
    """The lines of one format."""
    numbers = {rows * (1 + n) for rows in TABLE_ROWS for n in range(options.most + 1)}
    engine = open_planned(
        options.model,
        EngineConfig(
            dtype="bfloat16",
            quantization=FORMATS[name],
            max_num_seqs=MOST_LOGITS,
            max_model_len=256,
            speculative_config={"method": "mtp", "num_speculative_tokens": options.most},
        ),
    )
    runners = load_runners(engine)
    runners.warmup()
    draft, limits, start = runners.draft, engine.plan.limits, options.prompt_tokens
    assert draft is not None, "the method has a second model"
    steps: dict[int, list[float]] = {each: [] for each in numbers if each <= MOST_LOGITS}
    drafts: dict[int, list[float]] = {each: [] for each in TABLE_ROWS}
    try:
        for _ in range(options.rounds):
            for times, timed in (
                (steps, (runners.target, limits)),
                (drafts, (draft.runner, draft.limits)),
            ):
                for rows, found in times.items():
                    found.append(measure_decode_ms(*timed, time.perf_counter, rows, start))
    finally:
        runners.close()
    steps_ms = {rows: statistics.median(found) for rows, found in steps.items()}
    lines: list[str] = []
    for rows in TABLE_ROWS:
        draft_ms = statistics.median(drafts[rows])
        least, number = break_even(steps_ms, draft_ms, rows, options.most)
        lines.append(
            f"{name:9} {rows:4} {steps_ms[rows]:9.2f} {steps_ms[2 * rows]:11.2f} "
            f"{draft_ms:9.2f} {100 * least:12.0f} {number:7}"
        )
    return lines


def forced() -> ExitStack:
    """Meanwhile a second model drafts in each step, whatever that costs."""
    stack = ExitStack()
    stack.enter_context(patch.object(ModelDrafter, "_cost", PropertyMock(return_value=None)))
    stack.enter_context(patch.object(StepDrafts, "_may_draft", lambda *_: True))
    stack.enter_context(patch.object(DraftCosts, "is_stale", lambda *_: False))
    stack.enter_context(patch.object(Drafting, "is_due", lambda *_: True))
    return stack


def own_acceptance(name: str, options: argparse.Namespace) -> str:
    """One line: of the drafts of the model's own layer, one in each step, greedy and sampled."""
    shares: list[str] = []
    with (
        forced(),
        LLM(
            options.model,
            dtype="bfloat16",
            quantization=FORMATS[name],
            max_num_seqs=1,
            max_model_len=1024,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        ) as llm,
    ):
        counts = llm.core.draft_counts
        tasks = options.tasks.split(",")
        contents = [f"{TASKS[task]}\n\n({at + 1})" for task in tasks for at in range(ANSWERS)]
        prompts: list[Any] = [[{"role": "user", "content": each}] for each in contents]
        for temperature in (0.0, 0.7):
            before = counts.num_accepted_tokens, counts.num_draft_tokens
            params = {"max_tokens": options.length, "temperature": temperature, "seed": 1}
            llm.chat(prompts, params)
            drafted = counts.num_draft_tokens - before[1]
            share = (counts.num_accepted_tokens - before[0]) / max(1, drafted)
            shares.append(f"{100 * share:9.1f} of {drafted:5}")
    return f"{name:9} {' '.join(shares)}"


def print_break_even(options: argparse.Namespace) -> None:
    print("format    rows   step ms   2 tokens   draft ms   break-even %  drafts", flush=True)
    for name in FORMATS:
        print("\n".join(measure_break_even(name, options)), flush=True)
    print("\nown drafts that are accepted, %, and their number: greedy, at temperature 0.7")
    for name in FORMATS:
        print(own_acceptance(name, options), flush=True)


def chances(text: str) -> list[float]:
    """Of `--acceptance`."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= 1 for each in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give numbers from 0 to 1 with commas between, or none; a model goes before "
            "the option"
        )
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drafts on and off, in alternating rounds.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--shape", help="random weights in place of a model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument(
        "--acceptance",
        nargs="?",
        const=[],
        type=chances,
        metavar="CHANCES",
        help="made-up drafts, right with these chances; alone: where the drafts of an MTP layer "
        "begin to pay",
    )
    parser.add_argument("--hopeless", action="store_true", help="made-up drafts, all wrong")
    parser.add_argument("--own-drafts", action="store_true", help="none are exchanged")
    parser.add_argument("--draft-shape", help="random weights in place of a draft model")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of made-up drafts' prompts")
    parser.add_argument("--most", type=int, default=5, help="made-up drafts in a step")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="tokens a second of processor time, for a machine that does other work, too; "
        "with CADENZA_NUM_THREADS=1, since threads that wait for another use the processor",
    )
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.acceptance == []:
        print_break_even(options)
        return
    config: dict[str, Any] = {"method": options.method}
    if options.acceptance is not None:
        config["num_speculative_tokens"] = options.most
    if options.draft is not None:
        config["model"] = options.draft
    loads = options.rows.split(",")
    rows = [int(each) for each in loads if "+" not in each]
    most_rows = max([int(each) for load in loads for each in load.split("+")])
    if options.draft_shape is not None:
        folder = cached_checkpoint(options.draft_shape, cache_folder(), lambda _: None)
        config["model"] = str(folder)
    model: str | Path | None = options.model
    if options.shape is not None:
        model = cached_checkpoint(options.shape, cache_folder(), lambda _: None)
    with LLM(
        model,
        max_num_seqs=most_rows,
        max_model_len=1024,
        speculative_config=config,
        quantization=options.quantization,
    ) as llm:
        if options.hopeless:
            print("rows       off t/s    on t/s   ratio", flush=True)
            for load in loads:
                print(measure_hopeless(llm, load, options), flush=True)
            return
        if options.acceptance is not None:
            print("acceptance rows   off t/s    on t/s   ratio    best   accepted   of all tokens")
            for acceptance in options.acceptance:
                for each in rows:
                    print(measure_made_up(llm, acceptance, each, options), flush=True)
            return
        print("task    rows   off t/s    on t/s   ratio   accepted   of all tokens", flush=True)
        for task in options.tasks.split(","):
            for each in rows:
                print(measure(llm, task, each, options), flush=True)


if __name__ == "__main__":
    main()
