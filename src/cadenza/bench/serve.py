"""Loads a server that has the OpenAI completions API, and times its streamed answers.

Owns the connections and the reading of streams. Invariants: a time is taken when a chunk's bytes
have arrived, before they are parsed; a request whose stream ends without usage counts as failed.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx

from cadenza.bench import Clock, OnStatus
from cadenza.bench.serve_figures import (
    CompletedRequest,
    CpuTimes,
    FailedRequest,
    Outcome,
    ServeFigures,
    figures_of,
)
from cadenza.bench.workloads import MAX_CLIENTS, PlannedRequest, ServeOptions
from cadenza.errors import CadenzaError

_CPU_SECONDS = re.compile(r"^process_cpu_seconds_total(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class ServerError(CadenzaError):
    """The server cannot be measured: it does not answer, or not as the API says."""


class _Failed(Exception):
    """One request failed, for this reason."""


def measure_serving(options: ServeOptions, report: OnStatus) -> ServeFigures:
    """Loads the server and waits for all answers.

    Raises ServerError when the server cannot be reached, or lists no model.
    """
    model, loads = asyncio.run(_measure(options, report))
    return ServeFigures(
        url=options.base_url,
        model=model,
        loads=tuple(
            figures_of(each.outcomes, each.cpu, concurrency=each.clients) for each in loads
        ),
    )


def measure_outcomes(options: ServeOptions, report: OnStatus) -> list[Sequence[Outcome]]:
    """What came of each request, load by load; raises as `measure_serving` does."""
    _, loads = asyncio.run(_measure(options, report))
    return [each.outcomes for each in loads]


@dataclass(frozen=True, slots=True)
class _MeasuredLoad:
    clients: int | None
    outcomes: Sequence[Outcome]
    cpu: CpuTimes


async def _measure(options: ServeOptions, report: OnStatus) -> tuple[str, list[_MeasuredLoad]]:
    """The model's name on the server, and the loads."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CLIENTS)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(
        base_url=options.base_url,
        headers=headers,
        limits=limits,
        timeout=httpx.Timeout(options.timeout_s),
    ) as http:
        model = options.model or await _first_model(http)
        client = ServeClient(
            http, model, ignore_eos=options.ignore_eos, time_tokens=options.time_tokens
        )
        report("one request to warm up")
        await client.complete(options.warm_up())
        loads: list[_MeasuredLoad] = []
        for clients, requests in options.loads():
            how = "at a rate" if clients is None else f"from {clients} clients"
            watch = _Watch(len(requests), how, report)
            loads.append(await _load(client, requests, clients, watch))
    return model, loads


class _Watch:
    """Reports the progress of a load with each request that ends."""

    def __init__(self, num_requests: int, how: str, report: OnStatus) -> None:
        self._of, self._report = f"{num_requests} requests {how}", report
        self._num_done = self._num_tokens = 0
        self._start_s = time.perf_counter()
        report(self._of)

    def add(self, outcome: Outcome) -> None:
        self._num_done += 1
        if isinstance(outcome, CompletedRequest):
            self._num_tokens += outcome.num_output_tokens or 0
        rate = self._num_tokens / (time.perf_counter() - self._start_s)
        self._report(f"{self._of}: {self._num_done} done, {rate:.1f} tok/s")


async def _load(
    client: "ServeClient", requests: Sequence[PlannedRequest], clients: int | None, watch: _Watch
) -> _MeasuredLoad:
    server_before_s, client_before_s = await client.server_cpu_s(), time.process_time()
    if clients is None:
        outcomes = await _open_loop(client, requests, watch)
    else:
        outcomes = await _closed_loop(client, requests, clients, watch)
    client_s, server_after_s = time.process_time() - client_before_s, await client.server_cpu_s()
    server_s = None
    if server_before_s is not None and server_after_s is not None:
        server_s = server_after_s - server_before_s
    return _MeasuredLoad(clients, outcomes, CpuTimes(client_s=client_s, server_s=server_s))


async def _closed_loop(
    client: "ServeClient", requests: Sequence[PlannedRequest], clients: int, watch: _Watch
) -> list[Outcome]:
    """Each client sends its next request when its last one is done."""
    left = iter(requests)
    outcomes: list[Outcome] = []

    async def send_all() -> None:
        for request in left:
            outcomes.append(await client.complete(request))
            watch.add(outcomes[-1])

    await asyncio.gather(*(send_all() for _ in range(clients)))
    return outcomes


async def _open_loop(
    client: "ServeClient", requests: Sequence[PlannedRequest], watch: _Watch
) -> list[Outcome]:
    """Each request is sent at its time of arrival, however many are open."""

    async def send(request: PlannedRequest) -> Outcome:
        await asyncio.sleep(request.after_s)
        outcome = await client.complete(request)
        watch.add(outcome)
        return outcome

    return list(await asyncio.gather(*map(send, requests)))


class ServeClient:
    """Completions over one connection pool."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        *,
        ignore_eos: bool = True,
        time_tokens: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._http = http
        self._model = model
        self._ignore_eos = ignore_eos
        self._content = "token_ids" if time_tokens else "text"
        self._clock = clock

    async def complete(self, request: PlannedRequest) -> Outcome:
        """One streamed completion, until it ends or fails."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._content == "token_ids":
            body["return_token_ids"] = True
        sent_s = self._clock()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _Failed(str(response.status_code))
                return await self._read(response, sent_s)
        except _Failed as failed:
            reason = str(failed)
        except httpx.TimeoutException:
            reason = "timeout"
        except httpx.HTTPError as error:
            reason = type(error).__name__
        return FailedRequest(sent_s=sent_s, end_s=self._clock(), reason=reason)

    async def server_cpu_s(self) -> float | None:
        """The server's processor time; None where its metrics lack it."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        found = _CPU_SECONDS.search(response.text)
        return None if found is None else float(found.group(1))

    async def _read(self, response: httpx.Response, sent_s: float) -> CompletedRequest:
        content_s: list[float] = []
        num_content_tokens: list[int] = []
        usage: dict[str, Any] | None = None
        async for data, arrived_s in self._frames(response):
            chunk = _object(data)
            if "error" in chunk:
                raise _Failed("error frame")
            choices = chunk.get("choices") or ()
            if any(choice.get(self._content) for choice in choices):
                content_s.append(arrived_s)
                if self._content == "token_ids":
                    num_content_tokens.append(sum(len(each[self._content]) for each in choices))
            usage = chunk.get("usage") or usage
        return CompletedRequest(
            sent_s=sent_s,
            content_s=tuple(content_s),
            end_s=self._clock(),
            num_prompt_tokens=_count(usage, "prompt_tokens"),
            num_output_tokens=_count(usage, "completion_tokens"),
            num_content_tokens=tuple(num_content_tokens),
        )

    async def _frames(self, response: httpx.Response) -> AsyncIterator[tuple[str, float]]:
        """(data, time) of each server-sent event until `[DONE]`."""
        rest = b""
        async for received in response.aiter_bytes():
            arrived_s = self._clock()
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip().decode(errors="replace")
                if data == "[DONE]":
                    return
                yield data, arrived_s
        raise _Failed("cut stream")


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(
            f"{http.base_url} does not answer ({type(error).__name__}); is a server running there?"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(
            f"{http.base_url} answers {response.status_code} to /v1/models; give --model, or "
            f"--api-key if the server requires one"
        )
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerError(
            f"{http.base_url} does not list its models at /v1/models; give --model"
        ) from None


def _count(usage: dict[str, Any] | None, name: str) -> int:
    count = (usage or {}).get(name)
    if not isinstance(count, int):
        raise _Failed("no usage")
    return count


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise _Failed("not JSON") from None
    if not isinstance(value, dict):
        raise _Failed("not an object")
    return cast(dict[str, Any], value)
