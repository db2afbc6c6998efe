"""What `generate` prints when streams are done: blocks of text, JSON lines, a table.

Owns the forms. Knows nothing of terminals but the table's width. Invariant: every line of JSON is
valid JSON (a number that is not finite becomes null).
"""

import json
import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cadenza.cli.batch_run import BatchRun, Stream
from cadenza.cli.words import NOTHING, clipped, counted, on_one_line, rate_text, seconds_text
from cadenza.outputs import Logprob

SHOWN_PROMPT = 200


def block(stream: Stream, count: int) -> str:
    """A finished stream as plain text: one of several is headed by its number and prompt."""
    text = stream.text.rstrip("\n")
    if count == 1:
        return f"{text}\n"
    return f"[{stream.index + 1}] {clipped(on_one_line(stream.shown), SHOWN_PROMPT)}\n{text}\n\n"


def failure(stream: Stream) -> str | None:
    """Why a stream failed; None when it did not."""
    completion = stream.completion
    if completion is None or completion.finish_reason != "error":
        return None
    return f"prompt {stream.index + 1} failed: {completion.error}"


def json_lines(run: BatchRun, facts: dict[str, Any]) -> list[str]:
    """One object for each stream in the prompts' order, then the summary with `facts`."""
    found = [_describe(stream) for stream in run.streams]
    summary = {
        "object": "summary",
        **facts,
        "num_requests": len(run.streams),
        "num_prompt_tokens": sum(len(each["prompt_token_ids"]) for each in found),
        "num_cached_tokens": sum(each["num_cached_tokens"] for each in found),
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
    completion = stream.completion
    return (
        str(stream.index + 1),
        NOTHING if stream.row is None else str(stream.row),
        str(len(stream.request.prompt_token_ids)),
        str(_num_cached(stream)),
        seconds_text(stream.ttft_s),
        str(stream.num_tokens),
        rate_text(stream.tokens_per_s),
        (completion.finish_reason if completion is not None else None) or NOTHING,
    )


def _num_cached(stream: Stream) -> int:
    return 0 if stream.output is None else stream.output.num_cached_tokens


def _describe(stream: Stream) -> dict[str, Any]:
    output, completion = stream.output, stream.completion
    assert output is not None, "JSON is written when all streams are done"
    assert completion is not None, "an output has one completion"
    described: dict[str, Any] = {
        "object": "request",
        "index": stream.index,
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": stream.ttft_s,
        "tokens_per_s": stream.tokens_per_s,
    }
    if stream.request.params.logprobs is not None:
        described["logprobs"] = [
            _describe_logprobs(token_id, found)
            for token_id, found in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ]
    if completion.error is not None:
        described["error"] = completion.error
    return described


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
        "logprob": found.logprob if math.isfinite(found.logprob) else None,
        "rank": found.rank,
    }
