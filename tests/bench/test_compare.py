"""`cadenza bench compare`: the order of rounds, ratios, and a planted difference that comes out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cadenza.bench.serve import MeasuredLoad
from cadenza.bench.serve_figures import CompletedRequest, CpuTimes, LoadSetting, figures_of
from cadenza.bench.serve_options import LoadOptions
from cadenza.cli import main
from cadenza.errors import ConfigError
from cadenza_bench.compare.options import CompareOptions
from cadenza_bench.compare.rounds import METRICS, ServerRounds, compare_servers, ratio_of
from tests.bench.scripted_server import REFUSED, ScriptedServer, running

SMALL: dict[str, Any] = {"prompt_lens": (2, 9), "output_lens": (2, 4)}


@dataclass(slots=True, eq=False)
class ServedClock:
    """A clock that only servers move, by so much for each chunk."""

    now_s: float = 0.0

    def server(self, seconds: float) -> ScriptedServer:
        def advance() -> None:
            self.now_s += seconds

        return ScriptedServer(before_chunk=advance)


def test_a_planted_difference_of_two_comes_out():
    clock = ServedClock()
    fast, slow = clock.server(0.5), clock.server(1.0)
    with running(fast), running(slow):
        servers = CompareOptions(url=[f"fast={fast.url}", f"slow={slow.url}"], rounds=3)
        options = LoadOptions(concurrency=(1,), num_requests=3, output_lens=(3, 6))
        found = compare_servers(servers, options, lambda line: None, lambda: clock.now_s)
    (load,) = found.loads
    ratios = {each.metric: each for each in load.ratios if each.server == "slow"}
    assert set(ratios) <= set(METRICS)
    for metric, planted in (("e2e_mean_s", 2.0), ("output_tok_s", 0.5)):
        each = ratios[metric]
        assert [each.low, each.mean, each.high, *each.rounds] == pytest.approx([planted] * 6)


def test_the_command_prints_one_object_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    a, b = ScriptedServer(), ScriptedServer()
    sizes = ("--concurrency", "1,2", "--num-requests", "3", "--output-len", "4", "--rounds", "2")
    with running(a), running(b):
        urls = ("--url", f"a={a.url}", "--url", f"b={b.url}", "--max-client-share", "1")
        command = ("bench", "compare", *urls, *sizes, "--json", "--plot", str(tmp_path))
        assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["servers"]["b"] == {"url": b.url, "model": "scripted"}
    assert [load["concurrency"] for load in found["results"]] == [1, 2]
    for load in found["results"]:
        assert {name: len(each) for name, each in load["servers"].items()} == {"a": 2, "b": 2}
        # Chunks of an answer that arrive together have no gaps, and so no ratio.
        metrics = {each["metric"] for each in load["ratios"]}
        assert {"output_tok_s", "ttft_mean_s", "e2e_mean_s"} <= metrics <= set(METRICS)
    assert [body["prompt"] for body in a.bodies[:4]] == [body["prompt"] for body in b.bodies[:4]]
    assert all(isinstance(body["prompt"], str) for body in a.bodies)
    names = {"index.html", "data.json", "throughput-closed.png", "timeline.png"}
    assert names | {"ttft-closed.png", "tpot-closed.png"} == {p.name for p in tmp_path.iterdir()}


def test_rounds_alternate_and_each_has_prompts_of_its_own():
    lines: list[str] = []
    a, b = ScriptedServer(), ScriptedServer()
    with running(a), running(b):
        urls = [f"a={a.url}", f"b={b.url}"]
        options = LoadOptions(request_rate=(500.0,), num_requests=3, **SMALL)
        found = compare_servers(CompareOptions(url=urls, rounds=3), options, lines.append)
    order = [line.split(":")[0] for line in lines if "done" not in line and "warming" not in line]
    assert order == [
        *("a, round 1 of 3", "b, round 1 of 3", "b, round 2 of 3"),
        *("a, round 2 of 3", "a, round 3 of 3", "b, round 3 of 3"),
    ]
    assert [body["prompt"] for body in a.bodies] == [body["prompt"] for body in b.bodies]
    assert len({body["prompt"] for body in a.bodies}) == 1 + 3 * 3
    assert found.models == {"a": "scripted", "b": "scripted"}
    assert [load.first.loop for load in found.loads] == ["open"]


def rounds_of(server: str, *ttfts_s: float) -> ServerRounds:
    """Rounds of one answer each, of which only the time to first token differs."""
    rounds: list[MeasuredLoad] = []
    for ttft_s in ttfts_s:
        answer = CompletedRequest(
            sent_s=1.0,
            content_s=(1.0 + ttft_s,),
            end_s=1.0 + ttft_s,
            num_prompt_tokens=1,
            num_output_tokens=1,
        )
        figures = figures_of([answer], CpuTimes(client_s=0.0, server_s=None), LoadSetting())
        rounds.append(MeasuredLoad(figures=figures, outcomes=[answer]))
    return ServerRounds(server=server, rounds=tuple(rounds))


def test_a_ratio_is_the_geometric_mean_of_the_rounds_with_an_interval_between_the_extremes():
    first, other = rounds_of("a", 1.0, 2.0, 4.0, 1.0), rounds_of("b", 2.0, 2.0, 8.0, 4.0)
    found = ratio_of(first, other, "ttft_mean_s", seed=1)
    assert found is not None
    assert found.rounds == pytest.approx((2.0, 1.0, 2.0, 4.0))
    assert found.mean == pytest.approx(2.0)
    assert found.mean == pytest.approx(other.mean("ttft_mean_s") / first.mean("ttft_mean_s"))  # type: ignore[operator]
    assert 1.0 <= found.low < found.mean < found.high <= 4.0
    assert ratio_of(first, other, "ttft_mean_s", seed=1) == found
    even = ratio_of(first, rounds_of("b", 3.0, 6.0, 12.0, 3.0), "ttft_mean_s", seed=1)
    assert even is not None
    assert (even.low, even.mean, even.high) == pytest.approx((3.0, 3.0, 3.0))
    # One answer of one token has no time per output token.
    assert ratio_of(first, other, "tpot_mean_s", seed=1) is None


def test_a_failure_on_one_server_makes_the_command_fail(capsys: pytest.CaptureFixture[str]):
    flags = ("--rounds", "1", "--concurrency", "1", "--num-requests", "60", "--output-len", "2")
    ids = ("--prompts", "ids", "--vocab-size", str(REFUSED + 1), "--input-len", "1")
    with running(ScriptedServer()) as a, running(ScriptedServer()) as b:
        urls = ("--url", f"a={a.url}", "--url", f"b={b.url}")
        assert main(["bench", "compare", *urls, *flags, *ids, "--max-client-share", "1"]) == 1
    out = capsys.readouterr().out
    assert "b over a:" in out
    assert "a: failed (1 client): " in out


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (None, "given 0 times"),
        (["a=http://x"], "given 1 times"),
        (["a=http://x", "a=http://y"], "names a twice"),
        (["a=http://x", "http://y"], "must be a name"),
        (["a=http://x", "b=y"], "'y' is no URL"),
        (["=http://x", "b=http://y"], "must be a name"),
    ],
)
def test_servers_need_a_name_and_a_url_each(given: list[str] | None, fault: str):
    with pytest.raises(ConfigError, match=fault):
        CompareOptions(url=given)


def test_a_sweep_is_of_one_server():
    servers = CompareOptions(url=["a=http://127.0.0.1:9", "b=http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match="--sweep finds the rates of one server"):
        compare_servers(servers, LoadOptions(sweep=2), lambda line: None)
    with pytest.raises(ConfigError, match="rounds 0"):
        CompareOptions(url=servers.url, rounds=0)
