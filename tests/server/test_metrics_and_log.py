"""Counts equal the client's, labels stay few, each request is one line of the log; the metrics' own
port, key and format; /health."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cadenza.engine.batch_engine import EngineStatus
from cadenza.engine.stats import EngineStats
from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.kernel_proof import KernelProof
from cadenza.server.access import ApiKeys
from cadenza.server.http.listening import Address, listening_for_metrics
from cadenza.server.lifecycle.handover import opened, taken_over
from cadenza.server.metrics import Metrics, ServedCounts
from cadenza.server.model_turns import ModelTurn
from tests.ports import kept_port
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    Serve,
    options,
    read_metrics,
    running_server,
    serving_at,
    serving_one,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine


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


def test_a_streams_usage_says_why_a_prompt_was_not_cached(bundled: RunningServer) -> None:
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


API_KEY, METRICS_KEY = "key-of-the-api", "key-of-metrics"


def status(url: str, key: str | None = None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(url, headers=headers, timeout=TIMEOUT_S, trust_env=False).status_code


@contextmanager
def with_port(
    script: tuple[int, ...], text: TextFrontend, **keys: ApiKeys
) -> Iterator[tuple[RunningServer, str]]:
    """A server, and the URL of its metrics' port."""
    with kept_port() as port, kept_port() as metrics_port, ExitStack() as stack:
        address = Address(port=port, metrics_port=metrics_port)
        sockets = stack.enter_context(opened(address))
        metrics = stack.enter_context(listening_for_metrics(address))
        settings = options(metrics_port=metrics_port, **keys)
        service = serving_one(ScriptedEngine(script), text, settings)
        sockets = replace(sockets, metrics=metrics)
        server = stack.enter_context(serving_at(service, address, sockets))
        yield server, f"http://127.0.0.1:{metrics_port}"


def test_a_port_of_their_own_has_the_metrics_and_probes_alone(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with with_port(script, text, keys=ApiKeys([API_KEY])) as (server, url):
        assert status(f"{url}/metrics") == 200
        assert status(f"{url}/ready") == 200
        for path in ("/v1/models", "/", "/metrics/", "/openapi.json", "/api/tags"):
            assert status(url + path, API_KEY) == 404, path
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 404
        assert status(f"{server.url}/metrics") == 401
        named = {"host": url.removeprefix("http://")}
        assert server.get("/metrics", headers=named).status_code == 401, "a header is no port"
        assert status(f"{server.url}/metrics", API_KEY) == 200


def test_a_key_of_their_own_opens_the_metrics_alone(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    keys = {"keys": ApiKeys([API_KEY]), "metrics_keys": ApiKeys([METRICS_KEY])}
    with with_port(script, text, **keys) as (server, url):
        for base in (server.url, url):
            assert status(f"{base}/metrics") == 401
            assert status(f"{base}/metrics", "another-key") == 401
            assert status(f"{base}/metrics", METRICS_KEY) == 200
            assert status(f"{base}/metrics", API_KEY) == 200
        assert status(f"{server.url}/v1/models", METRICS_KEY) == 401
        assert status(f"{server.url}/v1/models", API_KEY) == 200


def test_a_key_of_their_own_closes_the_metrics_of_an_open_server(serve: Serve) -> None:
    server = serve(metrics_keys=ApiKeys([METRICS_KEY]))
    assert status(f"{server.url}/metrics") == 401
    assert status(f"{server.url}/metrics", METRICS_KEY) == 200
    assert status(f"{server.url}/v1/models") == 200


def test_a_successor_has_the_port_once_the_predecessor_has_handed_over(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with kept_port() as port, kept_port() as metrics_port, ExitStack() as stack:
        address = Address(port=port, metrics_port=metrics_port)

        def serve(kind: str, patience_s: float) -> RunningServer:
            found = opened(address) if kind == "opened" else taken_over(address)
            sockets = stack.enter_context(found)
            metrics = stack.enter_context(listening_for_metrics(address, patience_s))
            settings = options(metrics_port=metrics_port)
            service = serving_one(ScriptedEngine(script), text, settings, (kind,))
            sockets = replace(sockets, metrics=metrics)
            return stack.enter_context(serving_at(service, address, sockets))

        first = serve("opened", 0.0)
        with pytest.raises(ConfigError, match=f"--metrics-port {metrics_port}: "):
            stack.enter_context(listening_for_metrics(address))
        serve("taken_over", TIMEOUT_S)
        found = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False)
        assert 'model_name="taken_over"' in found.text
        first.thread.join(TIMEOUT_S)
        assert not first.thread.is_alive()


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (None, False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4",
            True,
        ),
        ("application/openmetrics-text; version=x", True),
    ],
)
def test_openmetrics_are_given_when_asked_for(
    scripted: RunningServer, accept: str | None, is_open: bool
) -> None:
    answer = scripted.get("/metrics", headers={} if accept is None else {"accept": accept})
    kind = "application/openmetrics-text" if is_open else "text/plain"
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.endswith("# EOF\n") == is_open
    if is_open:
        names = {each.name for each in text_string_to_metric_families(answer.text)}
        assert {"vllm:prompt_tokens", "cadenza:e2e_request_latency_seconds"} <= names


PROOF = KernelProof(
    operations=("linear 6144x4096 bfloat16",), step_sizes=(1, 2, 4), num_single=2, elapsed_s=0.5
)


class ProvenEngine(ScriptedEngine):
    def status(self) -> EngineStatus:
        return replace(super().status(), kernel_proof=PROOF)


def test_health_has_the_proof_of_the_kernels(script: tuple[int, ...], text: TextFrontend) -> None:
    with running_server(ProvenEngine(script), text) as server:
        assert server.get("/health").json() == {
            "status": "ready",
            "kernel_proof": {
                "operations": ["linear 6144x4096 bfloat16"],
                "step_sizes": [1, 2, 4],
                "num_single": 2,
                "elapsed_s": 0.5,
                "products": [],
            },
        }
        assert server.get("/ready").json() == {"status": "ready"}


def test_health_has_no_proof_where_none_is_needed(serve: Serve) -> None:
    server = serve()
    assert server.get("/health").json() == {"status": "ready"}
