"""Loads a server that has the OpenAI API, and times its streamed answers from when each was due.
Arrivals are scheduled and encoded before a load begins. Invariants: requests of an open loop wait
for no answer, those of a closed loop only for that of their own client; what this client adds to
latencies is measured (`WatchedSelector`)."""

import asyncio
import math
import re
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from cadenza.bench import Clock, OnStatus
from cadenza.bench.datasets import Arrivals, PromptSource
from cadenza.bench.serve_client import RequestForm, ServeClient
from cadenza.bench.serve_figures import (
    ClientShare,
    CompletedRequest,
    CpuTimes,
    LoadFigures,
    LoadSetting,
    Outcome,
    ServeFigures,
    figures_of,
    spread_of,
)
from cadenza.bench.serve_options import LoadOptions, PlannedLoad, ServerAddress
from cadenza.bench.workloads import PlannedRequest
from cadenza.errors import CadenzaError
from cadenza.loading.memory import usable_cores
from cadenza.server_link import ServerLink

_EPOLL_S = 0.001  # timeouts are rounded up to this, which is not the client's being late


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedTime:
    """What was seen of the client within `elapsed_s`."""

    elapsed_s: float
    cpu_s: float
    lag_s: float
    longest_busy_s: float


class WatchedSelector(selectors.DefaultSelector):
    """Notes how long the loop is away from it and how late it wakes."""

    def __init__(
        self, clock: Clock = time.perf_counter, cpu_clock: Clock = time.process_time
    ) -> None:
        super().__init__()
        self._clock, self._cpu_clock = clock, cpu_clock
        self.restart()

    def restart(self) -> None:
        self._start_s = self._woken_s = self._clock()
        self._cpu_start_s = self._cpu_clock()
        self._longest_s = self._squares = self._late_s = 0.0
        self._num_timers = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        asked_s = self._clock()
        self._note_busy(asked_s - self._woken_s)
        events = super().select(timeout)
        self._woken_s = self._clock()
        if not events and timeout:
            due_s = asked_s + math.ceil(timeout / _EPOLL_S) * _EPOLL_S
            self._num_timers += 1
            self._late_s += max(0.0, self._woken_s - due_s)
        return events

    def read(self) -> WatchedTime:
        """Since the last restart. `lag_s`: what a chunk waits on average if it arrives at any time:
        the mean lateness of a wake-up, and half of the square of each busy time over the whole
        time."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._start_s, 1e-9)
        busy_s = now_s - self._woken_s
        squares, longest_s = self._squares + busy_s**2, max(self._longest_s, busy_s)
        return WatchedTime(
            elapsed_s=elapsed_s,
            cpu_s=self._cpu_clock() - self._cpu_start_s,
            lag_s=self._late_s / max(1, self._num_timers) + squares / (2 * elapsed_s),
            longest_busy_s=longest_s,
        )

    def _note_busy(self, busy_s: float) -> None:
        self._squares += busy_s**2
        self._longest_s = max(self._longest_s, busy_s)


Result = TypeVar("Result")

# The share of arrivals answered, in the second half of the time of arrivals, by a server that keeps
# up; before, the first answers are still to come.
KEPT_UP = 0.95
GOOD_SHARE = 0.9  # or, with --goodput, when this share of them is good

_CPU_SECONDS = re.compile(r"^process_cpu_seconds_total(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_PROBE = PlannedRequest(text="Hi", max_tokens=1)
_TICK_S = 0.05  # between two timers by which the lateness of wake-ups is seen
_TIMER_S = 0.001
# Of the mean gap between arrivals, the most that is spent on meeting a due time exactly.
_SPIN_SHARE = 0.01


class ServerError(CadenzaError):
    """The server cannot be measured: it does not answer, or not as the API says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """A load's figures, and the outcomes that they follow from."""

    figures: LoadFigures
    outcomes: Sequence[Outcome]


def measure_serving(address: ServerAddress, options: LoadOptions, report: OnStatus) -> ServeFigures:
    """Raises ServerError when the server cannot be reached or lists no model; ConfigError when the
    data set cannot be read."""
    source = options.source()

    async def measure(watch: WatchedSelector) -> ServeFigures:
        async with LoadedServer(address, options, watch) as server:
            report("warming up")
            await server.warm_up(options.warm_ups(source))
            measured = [await server.measure(load, report) for load in options.loads(source)]
            if options.sweep is not None:
                async for each in server.sweep(measured, source, report):
                    measured.append(each)
            return ServeFigures(
                url=address.base_url,
                model=server.model,
                loads=tuple(each.figures for each in measured),
                timelines=tuple(each.outcomes for each in measured),
                capacity_rps=None if options.sweep is None else capacity_rps(measured),
            )

    return run_watched(measure)


def run_watched(work: Callable[[WatchedSelector], Coroutine[Any, Any, Result]]) -> Result:
    """On an event loop whose time is watched."""
    watch = WatchedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watch)) as runner:
        return runner.run(work(watch))


class LoadedServer:
    """A server and the client that loads it, as an asynchronous context."""

    def __init__(
        self,
        address: ServerAddress,
        options: LoadOptions,
        watch: WatchedSelector,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.model = ""
        self._clock = clock
        self._address, self._options, self._watch = address, options, watch
        self._http = address.link.async_client(timeout=options.timeout_s)

    async def __aenter__(self) -> "LoadedServer":
        try:
            self.model = self._address.model or await _first_model(self._address.link, self._http)
        except BaseException:
            await self._http.aclose()
            raise
        form = RequestForm(
            model=self.model,
            ignore_eos=self._options.ignore_eos,
            time_tokens=self._options.time_tokens,
            timeout_s=self._options.timeout_s,
        )
        self._client = ServeClient(self._address, form, self._clock)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()
        await self._http.aclose()

    async def warm_up(self, requests: Sequence[PlannedRequest]) -> None:
        await asyncio.gather(*map(self._client.complete, requests))

    async def measure(self, load: PlannedLoad, report: OnStatus) -> MeasuredLoad:
        probes: list[Outcome] = []
        encoded = list(map(self._client.encode, load.requests))
        progress = _Progress(load, report)
        ticks = [asyncio.create_task(_tick())]
        if self._options.probe_request_rate:
            ticks.append(asyncio.create_task(self._probe(probes)))
        server_before_s = await self._server_cpu_s()
        self._watch.restart()
        try:
            play = self._closed_loop if load.arrivals is None else self._open_loop
            outcomes = await play(load, encoded, progress)
            watched = self._watch.read()
        finally:
            for each in ticks:
                each.cancel()
            await asyncio.gather(*ticks, return_exceptions=True)
        server_after_s = await self._server_cpu_s()
        server_s = None
        if server_before_s is not None and server_after_s is not None:
            server_s = server_after_s - server_before_s
        answered = [each for each in probes if isinstance(each, CompletedRequest)]
        cpu = CpuTimes(
            client_s=watched.cpu_s,
            server_s=server_s,
            num_probe_tokens=sum(each.num_output_tokens for each in answered),
        )
        figures = figures_of(outcomes, cpu, self._setting(load))
        took_s = [each.e2e_s for each in answered]
        figures = replace(
            figures,
            probe=spread_of(took_s, self._options.metric_percentiles),
            client=client_share(watched, figures),
        )
        return MeasuredLoad(figures=figures, outcomes=outcomes)

    async def sweep(
        self, ends: Sequence[MeasuredLoad], source: PromptSource, report: OnStatus
    ) -> AsyncIterator[MeasuredLoad]:
        """The loads at rates between those that one client and many reached."""
        low, high = (each.figures.requests_per_s for each in ends)
        if not 0 < low <= high:
            return
        count = self._options.sweep or 0
        for at in range(1, count + 1):
            rate = low + (high - low) * at / count
            arrivals = Arrivals(rate=rate, burstiness=self._options.burstiness)
            load = self._options.at_rate(arrivals, source, len(ends) + at)
            yield await self.measure(load, report)

    def _setting(self, load: PlannedLoad) -> LoadSetting:
        return LoadSetting(
            concurrency=load.clients,
            arrivals=load.arrivals,
            goodput=self._options.goodput,
            percentiles=self._options.metric_percentiles,
        )

    async def _closed_loop(
        self, load: PlannedLoad, encoded: Sequence[bytes], progress: "_Progress"
    ) -> list[Outcome]:
        left = iter(zip(load.requests, encoded, strict=True))
        outcomes: list[Outcome] = []

        async def send_all() -> None:
            for request, data in left:
                found = await self._client.complete(request, data)
                outcomes.extend(found)
                progress.add(found)

        await asyncio.gather(*(send_all() for _ in range(load.clients or 1)))
        return outcomes

    async def _open_loop(
        self, load: PlannedLoad, encoded: Sequence[bytes], progress: "_Progress"
    ) -> list[Outcome]:
        assert load.arrivals is not None
        clock, start_s = self._client.clock, self._client.clock() + _TICK_S
        # A timer is up to a millisecond late; polling for that long would take processor time.
        spin_s = min(_TIMER_S, _SPIN_SHARE / load.arrivals.highest_rate)

        async def send(request: PlannedRequest, data: bytes, due_s: float) -> list[Outcome]:
            found = await self._client.complete(request, data, due_s)
            progress.add(found)
            return found

        tasks: list[asyncio.Task[list[Outcome]]] = []
        for request, data in zip(load.requests, encoded, strict=True):
            due_s = start_s + request.after_s
            await asyncio.sleep(max(0.0, due_s - spin_s - clock()))
            while clock() < due_s:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(send(request, data, due_s)))
        return [outcome for found in await asyncio.gather(*tasks) for outcome in found]

    async def _probe(self, outcomes: list[Outcome]) -> None:
        """Small requests, each a fixed time after the answer to the one before it."""
        while True:
            outcomes += await self._client.complete(_PROBE)
            await asyncio.sleep(1 / self._options.probe_request_rate)

    async def _server_cpu_s(self) -> float | None:
        """None where the server's metrics lack it."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        found = _CPU_SECONDS.search(response.text)
        return None if found is None else float(found.group(1))


def client_share(watched: WatchedTime, load: LoadFigures) -> ClientShare:
    lag_s = watched.lag_s + (load.send_lag.mean_s if load.send_lag else 0.0)
    ttft_s = load.ttft.mean_s if load.ttft else 0.0
    return ClientShare(
        cpu_share=watched.cpu_s / watched.elapsed_s / usable_cores(),
        lag_s=lag_s,
        lag_share=lag_s / ttft_s if ttft_s else 0.0,
        longest_busy_s=watched.longest_busy_s,
    )


def capacity_rps(loads: Sequence[MeasuredLoad]) -> float | None:
    """The highest rate that the server kept up with (with --goodput, with enough good requests)."""
    kept = [
        figures.arrivals.rate
        for each in loads
        if (figures := each.figures).arrivals is not None and _kept_up(each)
    ]
    return max(kept, default=None)


def _kept_up(load: MeasuredLoad) -> bool:
    figures = load.figures
    if figures.good_share is not None:
        return figures.good_share >= GOOD_SHARE
    starts = [each.start_s for each in load.outcomes]
    middle_s, last_s = (min(starts) + max(starts)) / 2, max(starts)
    num_arrived = sum(middle_s < each for each in starts)
    num_answered = sum(middle_s < each.end_s <= last_s for each in load.outcomes)
    return not figures.errors and num_answered >= KEPT_UP * num_arrived


class _Progress:
    def __init__(self, load: PlannedLoad, report: OnStatus) -> None:
        how = "at a rate" if load.clients is None else f"from {load.clients} clients"
        self._of, self._report = f"{len(load.requests)} requests {how}", report
        self._num_done = self._num_tokens = 0
        self._start_s = time.perf_counter()
        report(self._of)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self._num_done += 1
        for each in outcomes:
            if isinstance(each, CompletedRequest):
                self._num_tokens += each.num_output_tokens
        rate = self._num_tokens / (time.perf_counter() - self._start_s)
        self._report(f"{self._of}: {self._num_done} done, {rate:.1f} tok/s")


async def _tick() -> None:
    while True:
        await asyncio.sleep(_TICK_S)


async def _first_model(link: ServerLink, http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(link.explain(error)) from error
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
