"""`cadenza doctor`: what this machine will do, and what keeps it from doing more. `info` is about a
model, this about the machine and the installation; an issue begins with its output."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from cadenza.cli.options import JsonFlag
from cadenza.cli.report import json_line, sections_text
from cadenza.errors import CadenzaError

if TYPE_CHECKING:
    from cadenza.loading.machine import MachineReport

FAILED = 1

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):",
    "Water boils at",
)
NUM_TOKENS = 16


def doctor(*, json: JsonFlag = False) -> None:
    """Show what this machine will do and why: instruction sets, threads, memory, folders, device,
    versions; and prove with the bundled model that four prompts beside each other get the answers
    that each gets alone. Exit code 1 if something keeps Cadenza from answering.
    """
    from cadenza.backends import find_backend
    from cadenza.loading.machine import Finding, MachineReport, examine_machine

    report = examine_machine(find_backend("auto").describe_machine())
    proof, failure = _prove()
    found = (
        report.findings
        if failure is None
        else (
            *report.findings,
            Finding(level="problem", what=failure, advice="open an issue with this output"),
        )
    )
    report = MachineReport(facts={**report.facts, "proof": proof}, findings=found)
    print(json_line(asdict(report)) if json else _as_text(report))
    if any(each.level == "problem" for each in found):
        raise typer.Exit(FAILED)


def _prove() -> tuple[dict[str, Any], str | None]:
    """What was compared, and what is wrong with it."""
    from cadenza.frontend.llm import LLM
    from cadenza.request import SamplingParams

    started = time.perf_counter()
    try:
        with LLM(max_num_seqs=len(PROMPTS), max_model_len=256) as llm:
            params = SamplingParams(
                max_tokens=NUM_TOKENS, temperature=1.0, seed=7, logprobs=1, ignore_eos=True
            )
            loaded = time.perf_counter()
            together = llm.generate(list(PROMPTS), params, progress=False)
            alone = [llm.generate([prompt], params, progress=False)[0] for prompt in PROMPTS]
    except (CadenzaError, OSError) as error:
        return {}, f"the bundled model does not answer: {error}"
    bits = [
        [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in run]
        for run in (together, alone)
    ]
    is_equal = bits[0] == bits[1]
    facts = {
        "model": "bundled",
        "num_prompts": len(PROMPTS),
        "num_tokens_each": NUM_TOKENS,
        "is_bitwise_equal": is_equal,
        "load_s": loaded - started,
        "proof_s": time.perf_counter() - loaded,
    }
    wrong = None if is_equal else "answers beside each other differ from those alone"
    return facts, wrong


def _as_text(report: "MachineReport") -> str:
    lines = [sections_text(report.facts), ""]
    for each in report.findings:
        lines += [f"{each.level}: {each.what}", f"  to do: {each.advice}"]
    return "\n".join([*lines, *([] if report.findings else ["nothing to do"])])
