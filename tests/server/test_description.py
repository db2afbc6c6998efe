"""`/openapi.json`: its schemas take what the server takes; Schemathesis sends valid and invalid
requests, which have no 5xx and no undocumented status."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
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

from cadenza.server.errors import ApiError
from tests.server.bodies import BODIES, PATHS
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
NUM_EXAMPLES = 400
"""For each route and mode."""


def play(server: RunningServer) -> None:
    """Asks every route but the one whose answer has no end."""
    config = schemathesis.Config.from_dict(CONFIG)
    schema: Any = schemathesis.openapi.from_url(
        f"{server.url}/openapi.json", config=config, timeout=TIMEOUT_S
    )
    for result in schema.exclude(operation_id="batch_stream").get_all_operations():
        operation = result.ok()
        for mode in modes_of(operation):
            strategy = operation.as_strategy(generation_mode=mode)
            play_operation(strategy)


def modes_of(operation: Any) -> Iterator[schemathesis.GenerationMode]:
    """Any text is a name in a path: only a body and a query can be wrong."""
    yield schemathesis.GenerationMode.POSITIVE
    in_paths = (parameter.location == "path" for parameter in operation.iter_parameters())
    if operation.body or not all(in_paths):
        yield schemathesis.GenerationMode.NEGATIVE


def play_operation(strategy: Any) -> None:
    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
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


@pytest.mark.parametrize(
    ("name", "body", "is_valid"),
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
def test_the_schema_allows_what_the_server_takes(name: str, body: str, is_valid: bool) -> None:
    assert jsonschema_rs.is_valid(BODIES[name].object_schema(), json.loads(body)) == is_valid
    with nullcontext() if is_valid else pytest.raises(ApiError):
        BODIES[name].read(body.encode())


def test_the_description_has_the_schema_of_each_body(scripted: RunningServer) -> None:
    described = scripted.get("/openapi.json").json()
    for name, path in PATHS.items():
        content = described["paths"][path]["post"]["requestBody"]["content"]
        schema = json.loads(json.dumps(BODIES[name].object_schema()))
        assert content["application/json"]["schema"] == schema


@pytest.mark.soak
def test_no_request_that_can_be_described_breaks_the_server(bundled: RunningServer) -> None:
    play(bundled)
