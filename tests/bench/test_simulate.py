"""The simulator schedules what an engine over the token-storing runner does; its scripts."""

import json
import random
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks.client_times import (
    ClientLoad,
    ClientTimes,
    SeenChunk,
    StepTimes,
    TokenTime,
    client_load,
    steady,
)
from benchmarks.simulation_plot import plot
from cadenza import EngineConfig, Token
from cadenza.backends.fake import FakeRunner, next_token
from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.step_cost import full_decode
from cadenza.batch.step_schema import StepOutput
from cadenza.bench.serve_figures import CompletedRequest, FailedRequest
from cadenza.cli import main
from cadenza.config import EngineLimits, SchedulingPolicy
from cadenza.errors import ConfigError
from cadenza_bench.simulate.device import (
    SimulatedClock,
    SimulatedReplica,
    SimulatedServer,
    SimulatedSteps,
    given_server,
    make_simulated_core,
)
from cadenza_bench.simulate.record import GapCounts, PolicyFigures, SimulationRecord
from cadenza_bench.simulate.run import play_traffic, simulate, simulate_all
from cadenza_bench.simulate.traffic import VOCAB_SIZE, TrafficArrival, TrafficOptions
from tests.by_day import by_day

COST = (5.0, 0.25, 0.1, 0.0001)
CONFIG = EngineConfig(max_num_seqs=4, max_model_len=256, num_pages=24, max_num_batched_tokens=64)
TRAFFIC = TrafficOptions(
    num_requests=60,
    request_rate=10.0,
    prompt_lens=(4, 120),
    output_lens=(2, 40),
    num_tenants=2,
    flood=4.0,
    num_prefixes=2,
    prefix_len=40,
    arrivals="bursty",
)


class StoringSteps(SimulatedSteps):
    """Simulated steps that also write and read tokens as a real engine writes and reads KV."""

    def __init__(self, server: SimulatedServer, clock: SimulatedClock) -> None:
        super().__init__(server.limits, server.cost.predict_ms, clock)
        sizes = {
            "max_num_seqs": server.limits.max_num_seqs,
            "max_pages_per_seq": server.limits.max_pages_per_seq,
            "page_size": server.limits.page_size,
            "vocab_size": VOCAB_SIZE,
        }
        self._bucket = server.limits.max_num_batched_tokens
        self._packer = Packer(server.limits, VOCAB_SIZE)
        self._runner = FakeRunner(
            **sizes, num_pages=server.limits.num_pages, max_num_batched_tokens=self._bucket
        )

    def output(self, batch: Batch) -> StepOutput:
        return self._runner.launch(self._packer.pack(batch, self._bucket)).result()


class StreamRecord(SimulationRecord):
    def __init__(self, options: TrafficOptions) -> None:
        super().__init__(options)
        self.streams: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.times: list[tuple[int, float]] = []

    def take(self, event: object, now_s: float) -> None:
        if isinstance(event, Token):
            arrival = self.open[self.place, event.request_id].arrival
            self.prompts[event.request_id] = arrival.prompt_token_ids
            self.streams.setdefault(event.request_id, []).append(event.token_id)
            self.times.append((event.request_id, now_s))
        super().take(event, now_s)


def recorded(policy: SchedulingPolicy, *, is_storing: bool) -> StreamRecord:
    server, clock = given_server(COST, CONFIG), SimulatedClock()
    steps = StoringSteps(server, clock) if is_storing else None
    core, record = make_simulated_core(server, policy, clock, steps), StreamRecord(TRAFFIC)
    arrivals = TRAFFIC.traffic(server.limits.max_model_len)
    for _ in play_traffic([SimulatedReplica(core, clock)], arrivals, policy, record):
        core.check_invariants()
    assert core.scheduler.prefix_counts.num_hits > 0
    return record


@pytest.mark.parametrize("policy", by_day(get_args(SchedulingPolicy), {"priority"}))
def test_it_does_what_an_engine_that_stores_tokens_does_and_streams_are_exact(
    policy: SchedulingPolicy,
) -> None:
    stored = recorded(policy, is_storing=True)
    assert stored.times == recorded(policy, is_storing=False).times
    for request_id, stream in stored.streams.items():
        history = list(stored.prompts[request_id])
        for token_id in stream:
            assert token_id == next_token(history, (0, 0), vocab_size=VOCAB_SIZE)
            history.append(token_id)


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    options = replace(
        TRAFFIC,
        num_requests=1,
        num_tenants=1,
        flood=1.0,
        num_prefixes=0,
        prompt_lens=(40, 40),
        output_lens=(3, 3),
        arrivals="poisson",
    )
    server = given_server(COST, replace(CONFIG, max_itl_ms="none"))
    found = simulate(server, options, "fcfs")
    assert found.ttft is not None
    assert found.itl is not None
    prompt_ms = 5 + 0.25 * 40 + 0.1 + 0.0001 * 40 * 41 / 2
    assert found.ttft.max_s == pytest.approx(prompt_ms / 1000)
    assert found.itl.max_s == pytest.approx((5 + 0.25 + 0.1 + 0.0001 * 42) / 1000)
    assert (found.num_output_tokens, found.num_answers, found.fairness) == (3, 1, 1.0)


def test_what_comes_while_a_step_runs_is_in_the_next_one() -> None:
    server, clock = given_server((40.0, 0.01, 0.01, 1e-6), CONFIG), SimulatedClock()
    core, record = make_simulated_core(server, "fcfs", clock), StreamRecord(TRAFFIC)
    first = TrafficArrival(
        after_s=0.0, tenant=0, prompt_token_ids=(1,) * 8, max_tokens=20, priority=0
    )
    second = replace(first, after_s=0.412, max_tokens=2)
    for _ in play_traffic([SimulatedReplica(core, clock)], iter([first, second]), "fcfs", record):
        core.check_invariants()
    began_s = max(at_s for request_id, at_s in record.times if request_id == 0 and at_s < 0.412)
    assert next(at_s for request_id, at_s in record.times if request_id == 1) == pytest.approx(
        began_s + 2 * 0.04, abs=0.001
    )
    assert clock.now_s == pytest.approx(20 * 0.04, rel=0.01), "the device has paused"


def test_a_simulation_is_a_function_of_its_options() -> None:
    server = given_server(COST, CONFIG)
    first = simulate(server, TRAFFIC, "fcfs")
    assert simulate(server, TRAFFIC, "fcfs") == first
    assert simulate(server, replace(TRAFFIC, seed=1), "fcfs") != first
    assert first.num_answers + first.num_rejected == TRAFFIC.num_requests
    assert sum(each.num_answers for each in first.tenants) == first.num_answers


def test_a_server_of_ten_thousand_rows_is_simulated() -> None:
    server = given_server(COST, EngineConfig(max_num_seqs=10_000, max_model_len=256))
    assert server.limits.max_num_batched_tokens == 10_000
    found = simulate(server, TRAFFIC, "fcfs")
    assert found.num_answers == TRAFFIC.num_requests
    assert found.waiting is not None
    assert found.waiting.max_s < 2 * server.cost.predict_ms(full_decode(10_000)) / 1000


def test_what_does_not_fit_the_queue_is_counted_as_refused() -> None:
    server = given_server(COST, replace(CONFIG, max_num_queued_reqs=1))
    found = simulate(server, replace(TRAFFIC, request_rate=1000.0), "fcfs")
    assert found.num_rejected > 0
    assert found.good_share <= found.num_answers / TRAFFIC.num_requests


def polite_ttft_s(found: PolicyFigures) -> float:
    (polite,) = [each for each in found.tenants if each.tenant == "tenant-1"]
    assert polite.ttft is not None
    return polite.ttft.p50_s


def test_a_flood_delays_its_own_tenant_more_than_others() -> None:
    server = given_server(COST, replace(CONFIG, max_num_queued_reqs=1000))
    flooded = replace(TRAFFIC, num_requests=200, flood=20.0, request_rate=1.0)
    found = simulate(server, flooded, "fcfs")
    flood, polite = found.tenants
    assert flood.ttft is not None
    assert polite.ttft is not None
    assert 4 * polite.ttft.p50_s < flood.ttft.p50_s
    alone = simulate(server, replace(flooded, num_requests=10, flood=0.0), "fcfs")
    assert [each.tenant for each in alone.tenants] == ["tenant-1"]
    assert polite_ttft_s(alone) < polite_ttft_s(found)


def slowdown(policy: SchedulingPolicy, num_polite: int, seed: int, **limits: int) -> float:
    """How many times as long as alone the slowest first tokens of a tenant take while another one
    sends 20 times as many requests, more than the server can answer."""
    config = EngineConfig(max_num_queued_reqs=1 << 20, **limits)  # type: ignore[arg-type]
    server = given_server((5.4, 0.25, 0.1, 0.00002), config)
    options = TrafficOptions(num_tenants=2, request_rate=0.7, seed=seed)
    alone = simulate(server, replace(options, flood=0.0, num_requests=num_polite), policy)
    options = replace(options, flood=20.0, num_requests=21 * num_polite)
    found = simulate(server, options, policy)
    flood, polite = found.tenants
    (own,) = alone.tenants
    assert flood.ttft is not None
    assert polite.ttft is not None
    assert own.ttft is not None
    assert flood.ttft.p50_s > 10 * polite.ttft.p99_s, "the server was not flooded"
    return polite.ttft.p99_s / own.ttft.p99_s


FEW_PAGES = {"num_pages": 300}


@pytest.mark.parametrize(
    "limits", [{}, pytest.param(FEW_PAGES, marks=pytest.mark.soak)], ids=["rows", "pages"]
)
def test_a_flood_of_another_tenant_doubles_the_first_tokens_time_at_most(
    limits: dict[str, int],
) -> None:
    assert slowdown("fcfs", 40, 0, **limits) <= 2.0


@pytest.mark.soak
@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
@pytest.mark.parametrize("seed", range(4))
def test_a_flood_doubles_the_first_tokens_time_at_most_over_many_requests(
    policy: SchedulingPolicy, seed: int
) -> None:
    assert slowdown(policy, 300, seed) <= 2.0


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_arrivals_are_in_order_at_their_rate(arrivals: str) -> None:
    options = replace(TRAFFIC, arrivals=arrivals, num_tenants=1, flood=1.0, num_requests=20_000)
    times = [each.after_s for each in options.traffic(256)]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(options.request_rate, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    spread = float(np.std(gaps) / np.mean(gaps))
    assert spread == pytest.approx(1.0, abs=0.05) if arrivals == "poisson" else spread > 2


def test_a_long_tail_has_its_bounds_as_percentiles_and_exceeds_them() -> None:
    options = replace(TRAFFIC, lengths="tailed", num_prefixes=0, num_tenants=1, flood=1.0)
    lens = [len(each.prompt_token_ids) for each in islice(options._source(0, 1.0, 4096), 4000)]
    low, high = np.percentile(lens, [5, 95])
    assert (low, high) == (pytest.approx(4, abs=1), pytest.approx(120, rel=0.15))
    assert max(lens) > 300


def test_every_request_fits_the_context() -> None:
    options = replace(TRAFFIC, prompt_lens=(1, 500), output_lens=(1, 500), num_requests=300)
    for each in options.traffic(64):
        assert each.max_tokens >= 1
        assert len(each.prompt_token_ids) + each.max_tokens <= 64


def test_gaps_are_counted_within_half_a_per_cent() -> None:
    rng, gaps = random.Random(3), GapCounts()
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    for value in values:
        gaps.add(value)
    found = gaps.spread()
    assert found is not None
    for share, value in ((50, found.p50_s), (95, found.p95_s), (99, found.p99_s)):
        assert value == pytest.approx(np.percentile(values, share), rel=0.01)
    assert found.max_s == max(values)
    assert found.mean_s == pytest.approx(np.mean(values))
    assert GapCounts().spread() is None


def test_the_command_prints_a_table_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        *("bench", "simulate", "--step-cost", "5,0.25,0.1,0.0001", "--num-requests", "20"),
        *("--num-tenants", "2", "--policies", "fcfs,priority", "--max-num-seqs", "4"),
    ]
    assert main(flags) == 0
    table = capsys.readouterr().out
    assert "at most 50 ms" in table
    assert "tenant-1" in table
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in found["results"]] == ["fcfs", "priority"]
    assert found["results"][0]["num_answers"] == 20
    assert found["server"]["max_itl_ms"] == 50.0
    assert found["traffic"]["num_requests"] == 20


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policies": ("fifo",)}, "--policies 'fifo' is not one of fcfs"),
        ({"policies": ()}, "--policies is empty"),
        ({"arrivals": "even"}, "--arrivals 'even'"),
        ({"lengths": "long"}, "--lengths 'long'"),
        ({"num_requests": 0}, "--num-requests 0"),
        ({"request_rate": float("nan")}, "--request-rate nan"),
        ({"request_rate": 0.0}, "--request-rate 0.0"),
        ({"prompt_lens": (5, 4)}, "--input-len 5:4"),
        ({"output_lens": (0, 4)}, "--output-len 0:4"),
        ({"num_tenants": 101}, "--num-tenants 101"),
        ({"num_tenants": 1, "flood": 0.0}, "--flood 0.0"),
        ({"flood": float("inf")}, "--flood inf"),
        ({"max_ttft_s": 0.0}, "--max-ttft-s"),
        ({"step_cost": (1.0, 2.0)}, "--step-cost 1,2 must be 4 numbers"),
        ({"step_cost": (1.0, 2.0, float("nan"), 1.0)}, "--step-cost 1,2,nan,1"),
    ],
)
def test_traffic_out_of_bounds_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TRAFFIC, **fields)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_folder_for_pages_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    given = ["--step-cost", "5,1,1,1", "--prefix-cache-disk", str(folder)]
    assert main(["bench", "simulate", *given]) == 2
    assert "a simulation stores no pages" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(("max_itl_ms", "expected"), [("none", None), (70, 70.0), ("auto", 50.0)])
def test_the_bound_of_a_step_is_that_of_a_server(
    max_itl_ms: float | str, expected: float | None
) -> None:
    server = given_server(COST, replace(CONFIG, max_itl_ms=max_itl_ms))
    assert server.max_itl_ms == expected
    limits: EngineLimits = server.limits
    assert (limits.max_num_seqs, limits.num_pages, limits.max_num_queued_reqs) == (4, 24, 1024)


def test_progress_counts_the_requests_of_all_policies() -> None:
    seen: list[tuple[int, int]] = []
    options = replace(
        TRAFFIC, num_requests=1500, request_rate=1000.0, policies=("fcfs", "priority")
    )
    simulate_all(given_server(COST, CONFIG), options, lambda done, of: seen.append((done, of)))
    assert len(seen) == 2
    assert all(total == 3000 for _, total in seen)
    assert 1000 <= seen[0][0] <= 1500
    assert 2500 <= seen[1][0] <= 3000


def grouped(num_replicas: int, rate: float, num_prefixes: int = 4) -> PolicyFigures:
    options = replace(
        TRAFFIC,
        replicas=num_replicas,
        num_requests=400,
        num_tenants=1,
        flood=1.0,
        request_rate=rate,
        num_prefixes=num_prefixes,
        prefix_len=64,
        arrivals="poisson",
    )
    server = given_server(COST, replace(CONFIG, max_num_queued_reqs=16))
    return simulate(server, options, "fcfs")


def test_replicas_share_the_load_and_keep_prefixes_of_their_own() -> None:
    """Twice the load on two replicas is no worse than the load on one, since either may help the
    other, and prefixes are computed about as seldom."""
    one, two, overloaded = grouped(1, 8.0), grouped(2, 16.0), grouped(1, 20.0)
    assert (one.num_rejected, two.num_rejected) == (0, 0)
    assert one.ttft is not None
    assert two.ttft is not None
    assert two.ttft.p50_s <= 1.1 * one.ttft.p50_s
    assert two.cached_share >= 0.9 * one.cached_share
    assert overloaded.num_rejected > 0


def answer(
    sent_s: float, content_s: tuple[float, ...], counts: tuple[int, ...]
) -> CompletedRequest:
    return CompletedRequest(
        sent_s=sent_s,
        content_s=content_s,
        end_s=content_s[-1],
        num_prompt_tokens=3,
        num_output_tokens=sum(counts),
        num_content_tokens=counts,
    )


def load_of(num_clients: int, step_s: float, *chunks: SeenChunk) -> ClientLoad:
    return ClientLoad(num_clients=num_clients, step_s=step_s, chunks=chunks, firsts_s=(0.1,))


def test_a_load_says_the_mean_step_and_how_chunks_scatter_around_it() -> None:
    answers = [
        answer(0.0, (1.0, 1.2, 1.8), (1, 1, 3)),
        FailedRequest(sent_s=0.0, end_s=1.0, reason="429"),
        answer(2.0, (2.5,), (1,)),
    ]
    load = client_load(2, answers)
    assert load.step_s == pytest.approx(0.8 / 4)
    assert [each.num_tokens for each in load.chunks] == [1, 3]
    assert [each.stretch for each in load.chunks] == pytest.approx([1.0, 1.0])
    assert load.firsts_s == pytest.approx((1.0, 0.5))


def test_a_loop_is_steady_between_its_first_requests_and_the_last_one() -> None:
    outcomes = [answer(at, (at + 1.5,), (1,)) for at in (0.0, 0.1, 1.5, 1.6, 3.0, 3.2)]
    assert [each.sent_s for each in steady(outcomes, 2)] == [1.5, 1.6]
    assert [each.sent_s for each in steady(outcomes, 1)] == [0.1, 1.5, 1.6]


def test_steps_take_what_the_loads_say_and_more_for_prompt_tokens() -> None:
    one = SeenChunk(1, 1.0)
    times = StepTimes([load_of(4, 0.010, one), load_of(2, 0.006, one)], token_ms=0.5)

    def ms(rows: int, prompt_tokens: int = 0) -> float:
        return times.predict_ms(rows, prompt_tokens)

    assert ms(2) == pytest.approx(6)
    assert ms(3) == pytest.approx(8)
    assert ms(1) == pytest.approx(6)
    assert ms(6) == pytest.approx(14)
    assert ms(4, prompt_tokens=10) == pytest.approx(15)


def test_chunks_are_replayed_on_the_times_of_their_tokens() -> None:
    loads = [load_of(1, 0.01, SeenChunk(2, 1.5)), load_of(8, 0.01, SeenChunk(1, 0.5))]
    times = ClientTimes(loads, [[0.25], [-5.0]], seed=1)
    tokens = [TokenTime(at_s, 1) for at_s in (1.0, 2.0, 3.0, 5.0)]
    # Two tokens each and then the last one; half as much again.
    assert times.gaps_s(tokens) == pytest.approx([3.0, 3.0])
    assert times.gaps_s([TokenTime(at_s, 6) for at_s in (1.0, 2.0, 4.0)]) == [0.5, 1.0]
    assert times.gaps_s(tokens[:1]) == []
    assert times.delay_s(1) == 0.25
    assert times.delay_s(8) == 0.0


def test_a_simulation_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.png"
    flags = ["--step-cost", "5,1,1,0.001", "--num-requests", "20", "--json"]
    assert main(["bench", "simulate", *flags]) == 0
    plot(json.loads(capsys.readouterr().out), path)
    assert path.read_bytes().startswith(b"\x89PNG")
