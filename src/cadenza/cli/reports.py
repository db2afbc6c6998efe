"""What `generate` prints when streams are done: blocks of text, JSON lines, a table.

Owns the forms. Knows nothing of terminals but the table's width. Invariant: every line of JSON is
valid JSON (a number that is not finite becomes null).
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cadenza.cli.batch_run import BatchRun, Stream
from cadenza.cli.words import NOTHING, clipped, counted, on_one_line, rate_text, seconds_text
from cadenza.outputs import CompletionOutput, Logprob

SHOWN_PROMPT = 200


def block(stream: Stream, count: int) -> str:
    """A finished stream as plain text: one of several is headed by its number and prompt, one of a
    prompt's several samples by the sample's, too."""
    texts = [completion.text.rstrip("\n") for completion in stream.completions]
    if count == len(texts) == 1:
        return f"{texts[0]}\n"
    shown = clipped(on_one_line(stream.shown), SHOWN_PROMPT)
    number = str(stream.index + 1)
    numbers = [number] if len(texts) == 1 else [f"{number}.{k}" for k in range(1, len(texts) + 1)]
    return "".join(
        f"[{each}] {shown}\n{text}\n\n" for each, text in zip(numbers, texts, strict=True)
    )


def failure(stream: Stream) -> str | None:
    """Why a stream failed; None when it did not."""
    errors = [each.error for each in stream.completions if each.finish_reason == "error"]
    return f"prompt {stream.index + 1} failed: {errors[0]}" if errors else None


def json_lines(run: BatchRun, facts: dict[str, Any]) -> list[str]:
    """One object for each sample in the prompts' order, then the summary with `facts`."""
    found = [
        _describe(stream, completion) for stream in run.streams for completion in stream.completions
    ]
    summary = {
        "object": "summary",
        **facts,
        "num_requests": len(run.streams),
        "num_prompt_tokens": sum(len(each.request.prompt_token_ids) for each in run.streams),
        "num_cached_tokens": sum(_num_cached(each) for each in run.streams),
        "num_generated_tokens": run.num_tokens,
        "num_steps": run.num_steps,
        "elapsed_s": run.elapsed_s,
        "tokens_per_s": run.tokens_per_s,
    }
    return [json.dumps(each, allow_nan=False) for each in (*found, summary)]


def table(run: BatchRun) -> Table:
    """Times of each stream and of all."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=True, footer_style="bold")
    prompt_tokens = sum(len(stream.request.prompt_token_ids) for stream in run.streams)
    cached = sum(_num_cached(stream) for stream in run.streams)
    first = min((s.ttft_s for s in run.streams if s.ttft_s is not None), default=None)
    for name, total in (
        ("#", "all"),
        ("row", ""),
        ("prompt", str(prompt_tokens)),
        ("cached", str(cached)),
        ("TTFT", seconds_text(first)),
        ("tokens", str(run.num_tokens)),
        ("tok/s", rate_text(run.tokens_per_s)),
    ):
        found.add_column(name, total, justify="right", no_wrap=True)
    found.add_column("finish", no_wrap=True)
    for stream in run.streams:
        found.add_row(*_cells(stream))
    return found


def closing_line(run: BatchRun) -> str:
    """What the batch did as a whole."""
    num_rows = len({stream.row for stream in run.streams})
    return (
        f"{counted(len(run.streams), 'prompt')} on {counted(num_rows, 'row')}, "
        f"{counted(run.num_steps, 'step')} in {run.elapsed_s:.2f} s"
    )


def _cells(stream: Stream) -> tuple[str, ...]:
    reasons = dict.fromkeys(each.finish_reason or NOTHING for each in stream.completions)
    return (
        str(stream.index + 1),
        NOTHING if stream.row is None else str(stream.row),
        str(len(stream.request.prompt_token_ids)),
        str(_num_cached(stream)),
        seconds_text(stream.ttft_s),
        str(stream.num_tokens),
        rate_text(stream.tokens_per_s),
        ", ".join(reasons) or NOTHING,
    )


def _num_cached(stream: Stream) -> int:
    return 0 if stream.output is None else stream.output.num_cached_tokens


def _describe(stream: Stream, completion: CompletionOutput) -> dict[str, Any]:
    output, params = stream.output, stream.request.params
    assert output is not None, "JSON is written when all streams are done"
    described: dict[str, Any] = {
        "object": "request",
        "index": stream.index,
        "sample": completion.index,
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_generated_tokens": completion.num_generated_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": stream.ttft_s,
        "tokens_per_s": stream.tokens_per_s,
    }
    if params.logprobs is not None:
        described["cumulative_logprob"] = _finite(completion.cumulative_logprob)
        described["logprobs"] = _describe_tokens(completion.token_ids, completion.logprobs or ())
    if output.prompt_logprobs is not None and completion.index == 0:
        described["prompt_logprobs"] = _describe_tokens(
            output.prompt_token_ids, output.prompt_logprobs
        )
    if completion.error is not None:
        described["error"] = completion.error
    return described


def _describe_tokens(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None]
) -> list[dict[str, Any] | None]:
    """None for a token without a probability: a prompt's first."""
    return [
        None if found is None else _describe_logprobs(token_id, found)
        for token_id, found in zip(token_ids, logprobs, strict=False)
    ]


def _describe_logprobs(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
    """The chosen token, and all that are known, the likeliest first."""
    likeliest = sorted(found, key=lambda each: (-found[each].logprob, each))
    return {
        **_describe_logprob(token_id, found[token_id]),
        "top": [_describe_logprob(each, found[each]) for each in likeliest],
    }


def _describe_logprob(token_id: int, found: Logprob) -> dict[str, Any]:
    return {
        "token_id": token_id,
        "token": found.decoded_token,
        "logprob": _finite(found.logprob),
        "rank": found.rank,
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
