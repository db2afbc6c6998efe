"""A batch file in OpenAI's form, answered by a server of one's own.

    cadenza serve &
    pip install httpx
    python examples/batch_file.py http://127.0.0.1:8000 questions.jsonl answers.jsonl

A line of the input is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": …};
a line of the output has its `custom_id`, `response` and `error`, in the order in which they come.
Questions that the output has answers to are passed over, so that an interrupted run goes on.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import httpx

NUM_AT_ONCE = 32
"""A few more than the server's rows keep them filled; the rest of its queue is for others."""
TIMEOUT_S = 3600.0
TRY_LATER = (429, 503)
MAX_TRIES = 100


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--at-once", type=int, default=NUM_AT_ONCE)
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args(arguments)
    found = keep_whole(given.answers) if given.answers.exists() else []
    done = {line["custom_id"] for line in found if line["error"] is None}
    asked = [line for line in read(given.questions) if line["custom_id"] not in done]
    headers = {"authorization": f"Bearer {given.api_key}"}
    with given.answers.open("a", encoding="utf-8") as out:
        num_failed = asyncio.run(answer_all(asked, given.url, headers, out, given.at_once))
    print(f"{len(asked)} answered, {num_failed} of them with an error; {len(done)} were there")
    return 1 if num_failed else 0


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def keep_whole(file: Path) -> list[dict[str, Any]]:
    """The lines of an earlier run, without the part of one that it may have ended in."""
    text = file.read_text(encoding="utf-8")
    file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return read(file)


async def answer_all(
    asked: list[dict[str, Any]], url: str, headers: dict[str, str], out: TextIO, at_once: int
) -> int:
    """Writes each answer as it comes; the number of errors."""
    waiting, errors = iter(asked), 0
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits
    ) as client:

        async def work() -> None:
            nonlocal errors
            for line in waiting:
                response = await answered(client, line)
                is_error = response.status_code != httpx.codes.OK
                errors += is_error
                body = {"status_code": response.status_code, "body": response.json()}
                found = {"custom_id": line["custom_id"], "response": body}
                out.write(json.dumps({**found, "error": body["body"] if is_error else None}) + "\n")
                out.flush()

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(at_once, len(asked))):
                workers.create_task(work())
    return errors


async def answered(client: httpx.AsyncClient, line: dict[str, Any]) -> httpx.Response:
    """The answer, tried again while the server's queue is full or its engine starts."""
    for _ in range(MAX_TRIES):
        response = await client.request(line["method"], line["url"], json=line["body"])
        if response.status_code not in TRY_LATER:
            break
        await asyncio.sleep(float(response.headers.get("retry-after", 1)))
    return response


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
