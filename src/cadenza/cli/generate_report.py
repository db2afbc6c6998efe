"""What `generate` prints when streams are done: blocks of text, JSON lines, a table. Invariant:
every line of JSON is valid JSON (a number that is not finite becomes null).
"""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cadenza.cli.batch_run import BatchRun, BatchStream, told
from cadenza.cli.report import (
    Column,
    Columns,
    as_object,
    as_table,
    clipped,
    counted,
    json_line,
    keys,
    on_one_line,
    picked,
    rate_text,
    seconds_text,
)
from cadenza.outputs import CompletionOutput, Logprob

MAX_SHOWN_PROMPT = 200

_SUMMARY: Columns = (
    *keys("num_requests", "num_prompt_tokens", "num_cached_tokens"),
    Column("num_generated_tokens", read="num_tokens"),
    *keys("num_steps", "elapsed_s", "tokens_per_s"),
)


def block(stream: BatchStream, count: int) -> str:
    """A finished stream as plain text. One of several is headed by its number and prompt; one of a
    prompt's several samples also by the sample's number."""
    texts = [told(completion).rstrip("\n") for completion in stream.completions]
    if count == len(texts) == 1:
        return f"{texts[0]}\n"
    shown = clipped(on_one_line(stream.shown), MAX_SHOWN_PROMPT)
    number = str(stream.index + 1)
    numbers = [number] if len(texts) == 1 else [f"{number}.{k}" for k in range(1, len(texts) + 1)]
    return "".join(
        f"[{each}] {shown}\n{text}\n\n" for each, text in zip(numbers, texts, strict=True)
    )


def failure(stream: BatchStream) -> str | None:
    errors = [each.error for each in stream.completions if each.finish_reason == "error"]
    return f"prompt {stream.index + 1} failed: {errors[0]}" if errors else None


def json_lines(run: BatchRun, facts: dict[str, Any]) -> list[str]:
    """One object for each sample in the prompts' order, then the summary with `facts`."""
    found = [
        _sample_object(stream, completion)
        for stream in run.streams
        for completion in stream.completions
    ]
    summary = {"object": "summary", **facts, **as_object(_SUMMARY, run)}
    return [json_line(each) for each in (*found, summary)]


def table(run: BatchRun) -> Table:
    first_s = min((s.ttft_s for s in run.streams if s.ttft_s is not None), default=None)
    columns = (
        Column(None, "#", lambda stream: stream.index + 1, footer="all"),
        Column(None, "row", "row"),
        Column(None, "prompt", "num_prompt_tokens", footer=str(run.num_prompt_tokens)),
        Column(None, "cached", "num_cached_tokens", footer=str(run.num_cached_tokens)),
        Column(None, "TTFT", "ttft_s", seconds_text, footer=seconds_text(first_s)),
        Column(None, "tokens", "num_tokens", footer=str(run.num_tokens)),
        Column(None, "tok/s", "tokens_per_s", rate_text, footer=rate_text(run.tokens_per_s)),
        Column(None, "finish", "finish_reasons"),
    )
    return as_table(columns, run.streams)


def closing_line(run: BatchRun) -> str:
    num_rows = len({stream.row for stream in run.streams})
    return (
        f"{counted(len(run.streams), 'prompt')} on {counted(num_rows, 'row')}, "
        f"{counted(run.num_steps, 'step')} in {run.elapsed_s:.2f} s"
    )


def _sample_object(stream: BatchStream, completion: CompletionOutput) -> dict[str, Any]:
    output, params = stream.output, stream.request.params
    assert output is not None, "a stream without output has no samples"
    described: dict[str, Any] = {
        "object": "request",
        "index": stream.index,
        "sample": completion.index,
        **picked(output, "prompt", "prompt_token_ids", "num_cached_tokens"),
        **picked(completion, "text", "token_ids", "finish_reason", "stop_reason"),
        "num_generated_tokens": completion.num_generated_tokens,
        **picked(stream, "ttft_s", "tokens_per_s"),
    }
    if params.logprobs is not None:
        described["cumulative_logprob"] = _finite(completion.cumulative_logprob)
        described["logprobs"] = _token_objects(completion.token_ids, completion.logprobs or ())
    if output.prompt_logprobs is not None and completion.index == 0:
        described["prompt_logprobs"] = _token_objects(
            output.prompt_token_ids, output.prompt_logprobs
        )
    if completion.error is not None:
        described["error"] = completion.error
    return described


def _token_objects(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None]
) -> list[dict[str, Any] | None]:
    """The chosen tokens with their likeliest alternatives; None for a prompt's first token."""

    def entry(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
        logprob = found[token_id]
        return {
            "token_id": token_id,
            "token": logprob.decoded_token,
            "logprob": _finite(logprob.logprob),
            "rank": logprob.rank,
        }

    def entries(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
        likeliest = sorted(found, key=lambda each: (-found[each].logprob, each))
        return {**entry(token_id, found), "top": [entry(each, found) for each in likeliest]}

    return [
        None if found is None else entries(token_id, found)
        for token_id, found in zip(token_ids, logprobs, strict=False)
    ]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
