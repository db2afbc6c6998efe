"""The metrics' own port, key and format; and who has the port when servers follow each other."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys
from cadenza.server.http.listening import Address, listening_for_metrics
from cadenza.server.lifecycle.handover import opened, taken_over
from tests.ports import kept_port
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    options,
    running_server,
    serving_at,
    serving_one,
)
from tests.server.scripted_engine import ScriptedEngine

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


def test_a_key_of_their_own_closes_the_metrics_of_an_open_server(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    settings = options(metrics_keys=ApiKeys([METRICS_KEY]))
    with running_server(ScriptedEngine(script), text, settings) as server:
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
