"""Counts equal the client's, labels stay few, and each request is one line of the log."""

import re
import threading
import time
from typing import Any

from cadenza.engine.stats import EngineStats
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.metrics import Metrics, ServedCounts
from cadenza.server.model_turns import ModelTurn
from tests.server.harness import TIMEOUT_S, RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_streams import wait_until

LINE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")


def read_metrics(server: RunningServer) -> dict[str, float]:
    """Series to values; every line must be one."""
    found: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            matched = LINE.match(line)
            assert matched is not None, line
            found[f"{matched[1]}{{{matched[2] or ''}}}"] = float(matched[3])
    return found


def test_counts_are_those_of_the_client(server: RunningServer, engine: ScriptedEngine) -> None:
    before = read_metrics(server)
    usages = [
        server.post("/v1/completions", {"prompt": "the fox", "max_tokens": count}).json()["usage"]
        for count in (1, 5, 9)
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = server.events("/v1/completions", {"prompt": ["a", "b c"], "n": 2, **options})
    usages.append(streamed[-2]["usage"])
    ended = 'cadenza:e2e_request_latency_seconds_count{model_name="scripted"}'
    wait_until(lambda: read_metrics(server)[ended] == 5)  # it is counted once it was answered
    found = read_metrics(server)
    for prefix in ("vllm:", "cadenza:"):
        label = '{model_name="scripted"}'
        assert found[f"{prefix}prompt_tokens_total{label}"] == sum(
            usage["prompt_tokens"] for usage in usages
        )
        generated = sum(usage["completion_tokens"] for usage in usages)
        assert found[f"{prefix}generation_tokens_total{label}"] == generated
        ended = f'{prefix}request_success_total{{finished_reason="length",model_name="scripted"}}'
        assert found[ended] == 3 + 4
        assert found[f"{prefix}e2e_request_latency_seconds_count{label}"] == 5
        assert found[f"{prefix}time_to_first_token_seconds_count{label}"] == 5
        assert found[f"{prefix}request_generation_tokens_sum{label}"] == generated
    assert set(before) == set(found), "no request adds a series"


class DraftingModel:
    """A model whose engine drafts, and has done nothing else."""

    name = "model"

    def __init__(self) -> None:
        self.counts = ServedCounts()
        self.turn, self.num_loads = ModelTurn(), 1
        self.engine: Any = ScriptedEngine(())

    def stats(self) -> EngineStats:
        pages = {"live": 0, "cached": 0, "free": 1}
        return EngineStats(by_label={"pages": pages, "drafts_on": {"ngram,1": 1}})


def test_whether_drafts_pay_is_a_gauge_by_their_source_and_numbers_of_rows() -> None:
    model = DraftingModel()
    metrics = Metrics([model], model.counts, lambda: 0)
    family = next(each for each in metrics.collect() if each.name == "cadenza:drafts_on")
    labels = {"model_name": "model", "source": "ngram", "rows": "1"}
    assert [(sample.labels, sample.value) for sample in family.samples] == [(labels, 1.0)]


def test_a_refused_request_counts_no_tokens(server: RunningServer) -> None:
    before = read_metrics(server)
    assert server.post("/v1/completions", {"prompt": "x", "top_p": 7}).status_code == 400
    after = read_metrics(server)
    changed = {name for name in after if name.startswith("vllm:") and after[name] != before[name]}
    assert not changed


def wait_for_line(lines: list[dict]) -> dict:
    wait_until(lambda: lines)
    assert len(lines) == 1
    return lines[0]


def test_a_failed_request_is_one_line(
    server: RunningServer, engine: ScriptedEngine, lines: list[dict]
) -> None:
    engine.failing = "step_failed"
    server.events("/v1/completions", {"prompt": "the fox", "stream": True})
    line = wait_for_line(lines)
    assert (line["finish_reason"], line["status"], line["ttft_ms"]) == ("error", 500, None)


def test_a_cancelled_request_is_one_line(
    server: RunningServer, engine: ScriptedEngine, lines: list[dict]
) -> None:
    engine.pause()
    body = {"prompt": "the fox", "max_tokens": 200, "request_id": "mine-1"}
    asking = threading.Thread(target=server.post, args=("/v1/completions", body))
    asking.start()
    deadline = time.monotonic() + TIMEOUT_S
    while server.post("/v1/requests/mine-1/cancel").status_code != 200:
        assert time.monotonic() < deadline
    asking.join(TIMEOUT_S)
    line = wait_for_line(lines)
    assert (line["finish_reason"], line["request_id"]) == ("abort", "mine-1")


def test_lines_can_be_switched_off(
    engine: ScriptedEngine, text: TextFrontend, lines: list[dict]
) -> None:
    with running_server(engine, text, options(is_logging_requests=False)) as server:
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert not lines


LINES = "The quick brown fox jumps over the lazy dog, and a small red hen follows. "


def asked(salt: str, **fields: Any) -> dict[str, Any]:
    """A completion with a prompt that no other call with this salt has."""
    return {"prompt": LINES, "max_tokens": 1, "cache_salt": salt, **fields}


def test_a_streams_usage_says_why_a_prompt_was_not_cached(
    bundled: RunningServer,
) -> None:
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    body = asked("a stream", **streaming)
    usage = bundled.events("/v1/completions", body)[-2]["usage"]
    miss = {"shared_tokens": 0, "reason": "new"}
    assert usage["prompt_tokens_details"]["cache_miss"] == miss


def test_the_first_of_several_prompts_with_a_miss_is_told(bundled: RunningServer) -> None:
    texts = [LINES, "Other words. " * 12]
    body = asked("several")
    bundled.post("/v1/completions", body)
    usage = bundled.post("/v1/completions", {**body, "prompt": texts}).json()["usage"]
    miss = {"shared_tokens": 0, "reason": "differs"}
    assert usage["prompt_tokens_details"]["cache_miss"] == miss


def test_metrics_count_the_prompts_by_reason_and_the_tokens_behind_a_difference(
    bundled: RunningServer,
) -> None:
    def count(name: str, label: str = "") -> float:
        found = [
            value
            for series, value in read_metrics(bundled).items()
            if series.startswith(f"cadenza:{name}_total{{") and label in series
        ]
        assert len(found) == 1
        return found[0]

    body = asked("counted")
    bundled.post("/v1/completions", body)
    before = count("prefix_cache_missed_prompts", 'reason="differs"')
    tokens_before = count("prefix_cache_differing_tokens")
    changed = {**body, "prompt": LINES.replace("fox", "cat")}
    usage = bundled.post("/v1/completions", changed).json()["usage"]
    miss = usage["prompt_tokens_details"]["cache_miss"]
    assert count("prefix_cache_missed_prompts", 'reason="differs"') == before + 1
    num_differing = count("prefix_cache_differing_tokens") - tokens_before
    assert num_differing == usage["prompt_tokens"] - miss["shared_tokens"] > 0
