"""Schemathesis over `/openapi.json`: valid and invalid requests, no 5xx, no undocumented status."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.harness import TIMEOUT_S, RunningServer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
CONFIG = {"checks": {"negative_data_rejection": {"expected-statuses": ["4XX"]}}}
"""Any 4xx refuses: what is wrong may also be too large (413), which the default leaves out."""
SMALL, FULL = 6, 400
"""Examples for each route and mode."""


def play(server: RunningServer, num_examples: int) -> None:
    config = schemathesis.Config.from_dict(CONFIG)
    schema: Any = schemathesis.openapi.from_url(
        f"{server.url}/openapi.json", config=config, timeout=TIMEOUT_S
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in modes_of(operation):
            strategy = operation.as_strategy(generation_mode=mode)
            play_operation(server, strategy, num_examples)


def modes_of(operation: Any) -> Iterator[schemathesis.GenerationMode]:
    """Any text is a name in a path: only a body and a query can be wrong."""
    yield schemathesis.GenerationMode.POSITIVE
    in_paths = (parameter.location == "path" for parameter in operation.iter_parameters())
    if operation.body or not all(in_paths):
        yield schemathesis.GenerationMode.NEGATIVE


def play_operation(server: RunningServer, strategy: Any, num_examples: int) -> None:
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and case.path.startswith("/v1/"):
            case.body.pop("stream", None)
        case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)

    check()


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tokenize": "/tokenize"}


@pytest.mark.parametrize(
    ("endpoint", "body", "is_valid"),
    [
        ("completions", '{"prompt": "a", "max_tokens": 3.0, "n": 2.0, "seed": -0.0}', True),
        ("completions", '{"prompt": "a", "max_tokens": 3.5}', False),
        ("completions", '{"prompt": "a", "n": 1e3}', False),
        ("completions", '{"prompt": [5.0, 6, 7e0], "stop_token_ids": [8.0]}', True),
        ("completions", '{"prompt": [[5.0], [6]]}', True),
        ("completions", '{"prompt": [5.5]}', False),
        ("completions", '{"prompt": [true]}', False),
        ("completions", '{"prompt": ["a", [5], "b"]}', True),
        ("completions", '{"prompt": ""}', False),
        ("completions", '{"prompt": ["a", ""]}', False),
        ("completions", '{"prompt": []}', False),
        ("completions", '{"prompt": [[]]}', False),
        ("chat", '{"messages": [{"role": "user", "content": ""}], "top_k": 5.0}', True),
        ("chat", '{"messages": []}', False),
        ("tokenize", '{"prompt": ""}', True),
    ],
)
def test_the_schema_allows_what_the_server_takes(
    scripted: RunningServer, endpoint: str, body: str, is_valid: bool
) -> None:
    described = scripted.get("/openapi.json").json()["paths"][PATHS[endpoint]]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert jsonschema_rs.is_valid(schema, json.loads(body)) == is_valid
    with scripted.client() as client:
        headers = {"content-type": "application/json"}
        answer = client.post(PATHS[endpoint], content=body.encode(), headers=headers)
    assert answer.status_code == (200 if is_valid else 400), answer.text


@pytest.mark.slow
def test_no_request_that_can_be_described_breaks_the_server(scripted: RunningServer) -> None:
    play(scripted, SMALL)


@pytest.mark.soak
def test_none_of_thousands_does(bundled: RunningServer) -> None:
    play(bundled, FULL)
