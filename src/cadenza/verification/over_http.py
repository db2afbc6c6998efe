"""The gate against a running server: compares requests sent alone with requests sent together.

Uses only the HTTP API, so that the comparison includes everything between a client and the model:
token ids, log probabilities to the last digit, and finish reasons. Invariant: it passes only if
requests overlapped and every response was equal.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cadenza.errors import ConfigError
from cadenza.request import Request
from cadenza.verification.gate import GateResult, Mismatch, ModeResult, ReportProgress
from cadenza.verification.modes import Counts
from cadenza.verification.workload import (
    LONGEST_PROMPT,
    NUM_LOGPROBS,
    WorkloadShape,
    make_workload,
)

ROWS = 4
NUM_REQUESTS = 32
TIMEOUT_S = 600.0

HttpTokenRecord = tuple[Any, ...]
"""(token id, log probability, the most likely tokens with their log probabilities)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlOptions:
    """The server, and the shape of the workload."""

    url: str
    api_key: str | None = None
    num_requests: int = NUM_REQUESTS
    max_tokens: int = 48
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response to one request, with the times at which it started and ended."""

    records: tuple[HttpTokenRecord, ...]
    finish_reason: str
    num_cached_tokens: int
    start_s: float
    end_s: float


class RemoteServer:
    """A client of one server. Raises ConfigError unless it responds like a Cadenza server."""

    def __init__(self, options: UrlOptions) -> None:
        if not options.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {options.url!r} must begin with http:// or https://")
        self._base = options.url.rstrip("/").removesuffix("/v1")
        self._options = options
        (card, *_) = self._fetch("/v1/models", None)["data"]
        self.model: str = card["id"]
        self.context: int = card.get("max_model_len") or 0
        self.vocab_size: int = card.get("vocab_size") or 0
        if not self.context or not self.vocab_size:
            raise ConfigError(
                f"--url {options.url}: /v1/models has no max_model_len or vocab_size; use the URL "
                f"of a Cadenza server"
            )

    def play(self, request: Request, salt: str) -> Answer:
        params = request.params
        start_s = self._options.clock()
        body = {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "logprobs": NUM_LOGPROBS,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        answer = self._fetch("/v1/completions", body)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        tops = [tuple(top.items()) for top in found["top_logprobs"]]
        details: dict[str, int] = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(
            records=tuple(zip(choice["token_ids"], found["token_logprobs"], tops, strict=True)),
            finish_reason=choice["finish_reason"],
            num_cached_tokens=details.get("cached_tokens", 0),
            start_s=start_s,
            end_s=self._options.clock(),
        )

    def _fetch(self, path: str, body: dict[str, Any] | None) -> Any:
        key = self._options.api_key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        try:
            answer = httpx.request(
                method, self._base + path, json=body, headers=headers, timeout=TIMEOUT_S
            )
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            raise ConfigError(f"--url {self._base}: {path} returned status {code}") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            raise ConfigError(
                f"--url {self._base}: {path} cannot be reached or returned no JSON"
            ) from None


def verify_url(options: UrlOptions, report: ReportProgress) -> GateResult:
    """Sends each request alone, then all at once: cold, with cached prefixes, in reverse order.

    Raises:
        ConfigError: the server cannot be reached, or is not a Cadenza server.
    """
    server = RemoteServer(options)
    arrivals = make_workload(
        WorkloadShape(
            num_requests=options.num_requests,
            rows=ROWS,
            max_tokens=options.max_tokens,
            context=server.context,
            vocab_size=server.vocab_size,
            seed=options.seed,
        )
    )
    requests = [arrival.request for arrival in arrivals]
    result = GateResult(num_requests=len(requests), wanted=LONGEST_PROMPT + options.max_tokens)
    start_s = options.clock()
    alone: list[Answer] = []
    for request in requests:
        alone.append(server.play(request, secrets.token_hex(8)))
        report(f"alone {len(alone)}/{len(requests)}")
    tokens = sum(len(answer.records) for answer in alone)
    result.sequential_tokens_per_s = tokens / (options.clock() - start_s)
    result.longest = max(
        len(request.prompt_token_ids) + len(answer.records)
        for request, answer in zip(requests, alone, strict=True)
    )
    salt = secrets.token_hex(8)
    for name, order in (
        ("together, cold", list(range(len(requests)))),
        ("together, hot", list(range(len(requests)))),
        ("together, in reverse", list(reversed(range(len(requests))))),
    ):
        report(name)
        start_s = options.clock()
        answers = _play_together(server, requests, order, salt)
        _compare(result, name, alone, answers, options.clock() - start_s)
        if result.mismatch is not None:
            break
    return result


def _play_together(
    server: RemoteServer, requests: Sequence[Request], order: Sequence[int], salt: str
) -> list[Answer]:
    """Sends all requests at once, one thread each. Raises the first failure."""
    answers: dict[int, Answer] = {}
    failures: list[ConfigError] = []

    def play(index: int) -> None:
        try:
            answers[index] = server.play(requests[index], salt)
        except ConfigError as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [answers[index] for index in range(len(requests))]


def _compare(
    result: GateResult, name: str, alone: list[Answer], answers: list[Answer], seconds: float
) -> None:
    num_equal = 0
    for request, (solo, answer) in enumerate(zip(alone, answers, strict=True)):
        found = _first_difference(name, request, solo, answer)
        num_equal += found is None
        result.mismatch = result.mismatch or found
    counts = Counts(
        admitted_midstream=_num_overlapping(answers),
        cache_hits=sum(answer.num_cached_tokens > 0 for answer in answers),
    )
    result.counts.add(counts)
    result.modes.append(
        ModeResult(
            name=name,
            num_streams=len(answers),
            num_equal=num_equal,
            counts=counts,
            tokens_per_s=sum(len(answer.records) for answer in answers) / seconds,
            missing=() if counts.admitted_midstream else ("admitted_midstream",),
        )
    )


def _num_overlapping(answers: list[Answer]) -> int:
    """How many requests were sent while another one was open."""
    return sum(
        any(other.start_s < answer.start_s < other.end_s for other in answers) for answer in answers
    )


def _first_difference(name: str, request: int, solo: Answer, answer: Answer) -> Mismatch | None:
    left = [*solo.records, (solo.finish_reason,)]
    right = [*answer.records, (answer.finish_reason,)]
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return Mismatch(
                mode=name, request=request, index=index, expected=str(one), actual=str(other)
            )
    if len(left) == len(right):
        return None
    return Mismatch(
        mode=name,
        request=request,
        index=min(len(left), len(right)),
        expected=f"{len(solo.records)} tokens",
        actual=f"{len(answer.records)} tokens",
    )
