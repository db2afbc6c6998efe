"""The scripts beside the simulator: what closed loops say and how it is replayed; its picture."""

import json
from pathlib import Path

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
from cadenza.bench.serve_figures import CompletedRequest, FailedRequest
from cadenza.cli import main


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
