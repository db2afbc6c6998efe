"""Loads a server that speaks the OpenAI completions API, and times what comes back.

Owns the connections and the reading of streams. Knows no server in particular. Invariants: a time
is taken when a chunk's bytes have arrived, before they are parsed; a request whose stream ends
without usage counts as failed.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import httpx

from cadenza.bench.serve_figures import (
    Answer,
    CpuTimes,
    Failure,
    LoadFigures,
    Outcome,
    ServeFigures,
    figures_of,
)
from cadenza.bench.serve_workload import PlannedRequest, ServeWorkload
from cadenza.errors import CadenzaError, ConfigError

MAX_CONCURRENCY = 1024
REQUESTS_PER_CLIENT = 6
LEAST_REQUESTS = 12
REQUESTS_AT_A_RATE = 192
_CPU_SECONDS = re.compile(r"^process_cpu_seconds_total(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)

Report = Callable[[str], None]
Clock = Callable[[], float]


class ServerError(CadenzaError):
    """The server cannot be measured: it does not answer, or not as expected."""


class _Failed(Exception):
    """Ends one request with a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to load a server.

    Args:
        url: with or without `/v1`.
        model: its name there; None takes the first that the server lists.
        concurrency: clients at the same time, one load for each number.
        num_requests: of each load; None is six for each client, and twelve at least.
        ignore_eos: ask for answers of the full length.
        timeout_s: for the next piece of an answer.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: tuple[int, ...] = (1, 8, 32)
    num_requests: int | None = None
    request_rate: float | None = None
    prompt_lens: tuple[int, int] = (16, 512)
    output_lens: tuple[int, int] = (16, 128)
    vocab_size: int = 1000
    seed: int = 0
    ignore_eos: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"{self.url!r} is no URL; give one such as http://127.0.0.1:8000")
        if not self.concurrency or not all(1 <= n <= MAX_CONCURRENCY for n in self.concurrency):
            raise ConfigError(
                f"--concurrency {','.join(map(str, self.concurrency))} must be whole numbers from "
                f"1 to {MAX_CONCURRENCY}"
            )

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def loads(self) -> list[tuple[int | None, ServeWorkload]]:
        """(clients, workload) of each load; one load without clients where there is a rate."""
        if self.request_rate is not None:
            return [(None, self._workload(REQUESTS_AT_A_RATE, 1))]
        return [
            (clients, self._workload(max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients), part))
            for part, clients in enumerate(self.concurrency, start=1)
        ]

    def warm_up(self) -> PlannedRequest:
        """One request of the same kind that no load has."""
        return self._workload(1, 0).requests()[0]

    def _workload(self, usual: int, part: int) -> ServeWorkload:
        return ServeWorkload(
            num_requests=usual if self.num_requests is None else self.num_requests,
            prompt_lens=self.prompt_lens,
            output_lens=self.output_lens,
            vocab_size=self.vocab_size,
            request_rate=self.request_rate,
            seed=self.seed,
            part=part,
        )


def measure_serving(options: ServeOptions, report: Report) -> ServeFigures:
    """Loads the server and waits for all answers.

    Raises:
        ConfigError: an option cannot work.
        ServerError: the server cannot be reached, or serves no model.
    """
    return asyncio.run(_measure(options, report))


def as_json(found: ServeFigures, options: ServeOptions) -> dict[str, Any]:
    """With seconds, counts and rates; the key is left out."""
    settings = {name: value for name, value in asdict(options).items() if name != "api_key"}
    return {
        "url": found.url,
        "model": found.model,
        "workload": settings,
        "results": [
            {
                **asdict(load),
                "output_tok_s": load.output_tok_s,
                "total_tok_s": load.total_tok_s,
                "requests_per_s": load.requests_per_s,
                "client_us_per_token": load.client_us_per_token,
                "server_us_per_token": load.server_us_per_token,
            }
            for load in found.loads
        ],
    }


async def _measure(options: ServeOptions, report: Report) -> ServeFigures:
    planned = [(clients, workload.requests()) for clients, workload in options.loads()]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONCURRENCY)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(
        base_url=options.base_url,
        headers=headers,
        limits=limits,
        timeout=httpx.Timeout(options.timeout_s),
    ) as http:
        model = options.model or await _first_model(http)
        client = ServeClient(http, model, ignore_eos=options.ignore_eos)
        report("one request to warm up")
        await client.complete(options.warm_up())
        loads: list[LoadFigures] = []
        for clients, requests in planned:
            how = "at a rate" if clients is None else f"from {clients} clients"
            report(f"{len(requests)} requests {how}")
            loads.append(await _load(client, requests, clients))
    return ServeFigures(url=options.base_url, model=model, loads=tuple(loads))


async def _load(
    client: "ServeClient", requests: Sequence[PlannedRequest], clients: int | None
) -> LoadFigures:
    server_before_s, client_before_s = await client.server_cpu_s(), time.process_time()
    if clients is None:
        outcomes = await _at_their_times(client, requests)
    else:
        outcomes = await _from_clients(client, requests, clients)
    client_s, server_after_s = time.process_time() - client_before_s, await client.server_cpu_s()
    server_s = None
    if server_before_s is not None and server_after_s is not None:
        server_s = server_after_s - server_before_s
    return figures_of(outcomes, CpuTimes(client_s=client_s, server_s=server_s), concurrency=clients)


async def _from_clients(
    client: "ServeClient", requests: Sequence[PlannedRequest], clients: int
) -> list[Outcome]:
    """Each client sends its next request when its last one is done."""
    left = iter(requests)
    outcomes: list[Outcome] = []

    async def play() -> None:
        for request in left:
            outcomes.append(await client.complete(request))

    await asyncio.gather(*(play() for _ in range(clients)))
    return outcomes


async def _at_their_times(
    client: "ServeClient", requests: Sequence[PlannedRequest]
) -> list[Outcome]:
    """Each request is sent when it is due, however many are open."""

    async def play(request: PlannedRequest) -> Outcome:
        await asyncio.sleep(request.after_s)
        return await client.complete(request)

    return list(await asyncio.gather(*map(play, requests)))


class ServeClient:
    """Completions over one connection pool."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        *,
        ignore_eos: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._http = http
        self._model = model
        self._ignore_eos = ignore_eos
        self._clock = clock

    async def complete(self, request: PlannedRequest) -> Outcome:
        """One streamed completion, to its end or its failure."""
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
        return Failure(sent_s=sent_s, end_s=self._clock(), reason=reason)

    async def server_cpu_s(self) -> float | None:
        """Seconds the server has computed, if its metrics tell."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        found = _CPU_SECONDS.search(response.text)
        return None if found is None else float(found.group(1))

    async def _read(self, response: httpx.Response, sent_s: float) -> Answer:
        content_s: list[float] = []
        usage: dict[str, Any] | None = None
        async for data, arrived_s in self._frames(response):
            chunk = _object(data)
            if "error" in chunk:
                raise _Failed("error frame")
            if any(choice.get("text") for choice in chunk.get("choices") or ()):
                content_s.append(arrived_s)
            usage = chunk.get("usage") or usage
        return Answer(
            sent_s=sent_s,
            content_s=tuple(content_s),
            end_s=self._clock(),
            num_prompt_tokens=_count(usage, "prompt_tokens"),
            num_output_tokens=_count(usage, "completion_tokens"),
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
            f"--api-key where it wants one"
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
