"""The time of each kernel of a card in decode steps and in a prefill, by XLA's profiler.

    python -m tests.gpu.profile MODEL FILE

MODEL has a few layers of Llama-3.1-8B's shape; FILE is given every kernel of every case.
"""

import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NAME_LEN = 110  # characters of a kernel's name that tell it from others; types follow
SHOWN, SHOWN_CASE = 5, "decode 64"  # kernels that the result has, of this case


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Args:
    rows: of decode steps, each a case.
    context: tokens of each row's prompt.
    steps: tokens that are decoded.
    prefill: prompts of the prefill, and their tokens.
    """

    rows: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    steps: int = 32
    prefill: tuple[int, int] = (4, 1900)


def profile(model: Path, sizes: Sizes, device: str = "cuda") -> dict[str, Any]:
    import numpy as np

    from cadenza import LLM, SamplingParams

    random, found = np.random.default_rng(0), dict[str, Any]()
    count, length = sizes.prefill
    cases = [(f"decode {n}", n, sizes.context, sizes.steps) for n in sizes.rows]
    cases.append(("prefill", count, length, 1))
    most = max(*sizes.rows, count)
    longest = max(sizes.context + sizes.steps, length + 1)
    with LLM(
        model, device=device, dtype="bfloat16", max_num_seqs=most, max_model_len=longest
    ) as llm:

        def generate(rows: int, tokens: int, steps: int) -> float:
            """Of new prompts, so that none is in the prefix cache."""
            prompts = random.integers(3, 200, (rows, tokens)).tolist()
            started = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=steps, ignore_eos=True))
            return time.perf_counter() - started

        for name, *case in cases:
            generate(*case)  # compiles what is left, and records graphs
            plain_s = generate(*case)
            events, traced_s = _traced(partial(generate, *case))
            found[name] = {"plain_s": plain_s, "traced_s": traced_s, **kernel_times(events)}
    return found


def _traced(work: Callable[[], float]) -> tuple[list[Any], float]:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    folder = Path(tempfile.mkdtemp())
    try:
        with jax.profiler.trace(str(folder), profiler_options=options):
            result = work()
        (path,) = folder.rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            return json.load(file)["traceEvents"], result
    finally:
        shutil.rmtree(folder)


def kernel_times(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The time from the first event of a GPU to the last one, and of each kernel its launches and
    microseconds, longest first."""
    events = list(events)
    names = {each["pid"]: each["args"]["name"] for each in events if _names_process(each)}
    on_gpu = [
        each for each in events if each.get("ph") == "X" and "GPU" in names.get(each["pid"], "")
    ]
    totals = dict[str, tuple[int, float]]()
    for each in on_gpu:
        launches, us = totals.get(name := each["name"][:NAME_LEN], (0, 0.0))
        totals[name] = launches + 1, us + each["dur"]
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    ends = [each["ts"] + each["dur"] for each in on_gpu]
    span_us = max(ends) - min(each["ts"] for each in on_gpu) if on_gpu else 0.0
    kernels = [[name, launches, round(us, 1)] for name, (launches, us) in ordered]
    return {"span_us": round(span_us, 1), "kernels": kernels}


def _names_process(event: Mapping[str, Any]) -> bool:
    return event.get("name") == "process_name"


def top_kernels(case: Mapping[str, Any], count: int = SHOWN) -> list[tuple[str, float]]:
    kernels: Sequence[Any] = case["kernels"]
    total = sum(us for *_, us in kernels)
    return [(short_name(name), round(100 * us / total, 1)) for name, _, us in kernels[:count]]


def short_name(name: str) -> str:
    own = name.replace("(anonymous namespace)::", "").replace("cadenza::cuda::", "")
    return own.removeprefix("void ").split("(")[0][:48]


def main(model: Path, path: Path) -> None:
    found = profile(model, Sizes())
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"case": SHOWN_CASE, "top": top_kernels(found[SHOWN_CASE])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
