"""HTTP end to end on MLX: an engine process, streams, clients that leave, steps that fail, memory
that does not suffice, kill -9, and the gate."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.front import EngineFront
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
from cadenza.errors import CheckpointError, ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import plan_model
from cadenza.verification.run import VerifyOptions, verify
from tests.mlx.faulty_child import EXHAUST, RAISE
from tests.mlx.tiny_models import KINDS
from tests.server.harness import RunningServer, running_server

CONFIG = EngineConfig(backend="mlx", dtype="float32", max_num_seqs=2, max_model_len=96)
LOAD_S = 180.0
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_child.py")))
BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}

ENDLESS = BODY | {"max_tokens": 60, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningServer, ProcessLink]]:
    link = ProcessLink(None, CONFIG, ProcessOptions(command=FAULTY))
    engine = EngineFront(link)
    with running_server(engine, TextFrontend(open_checkpoint(None))) as server:
        engine.wait_ready(LOAD_S)
        yield server, link


def test_an_answer_comes_from_an_engine_process_on_mlx(served: Any):
    server, link = served
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]
    assert link.pid not in (None, os.getpid())


@pytest.mark.soak
def test_a_client_that_leaves_its_stream_frees_its_row(served: Any):
    server, _ = served
    for _ in range(3):  # more than there are rows
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as left:
            assert next(left.iter_lines()).startswith("data: ")
    assert server.post("/v1/completions", BODY).status_code == 200


def texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        content = line.removeprefix("data: ")
        if content and content != "[DONE]":
            yield from (each["text"] for each in json.loads(content)["choices"])


@contextmanager
def endless(server: RunningServer) -> Iterator[tuple[str, Iterator[str]]]:
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=ENDLESS, timeout=LOAD_S) as stream:
        parts = texts(stream.iter_lines())
        yield next(parts), parts


@pytest.fixture(scope="module")
def undisturbed(served: Any) -> str:
    with endless(served[0]) as (first, parts):
        return first + "".join(parts)


@pytest.mark.parametrize("token_id", [RAISE, EXHAUST], ids=["raises", "lacks memory"])
def test_a_failing_step_ends_its_own_request_only(served: Any, undisturbed: str, token_id: int):
    server, link = served
    pid = link.pid
    with endless(server) as (first, parts):
        failed = server.post("/v1/completions", BODY | {"prompt": [3, 4, token_id]})
        assert first + "".join(parts) == undisturbed
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "step_failed"
    assert link.pid == pid


@pytest.mark.soak
def test_a_stream_goes_on_in_the_next_engine_when_its_own_is_killed(served: Any, undisturbed: str):
    server, link = served
    killed = link.pid
    with endless(server) as (first, parts):
        os.kill(killed, signal.SIGKILL)
        assert first + "".join(parts) == undisturbed
    assert link.pid != killed


def check_gate(model: Path | None, rows: int, num_requests: int) -> None:
    config = replace(CONFIG, max_num_seqs=rows, max_model_len=128)
    name = None if model is None else str(model)
    options = VerifyOptions(model=name, num_requests=num_requests, max_tokens=8, config=config)
    result, plan = verify(options, lambda _: None)
    assert result.passed, result.last_line
    assert result.last_line.startswith("REFERENCE-EXACT PASS bitwise")
    assert plan.traits.exactness == "bitwise"


def test_the_gate_passes_on_mlx(tiny_model: Callable[[str], Path]):
    check_gate(tiny_model("4 bits"), rows=3, num_requests=5)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind or "bundled")
def test_the_gate_passes_on_mlx_for_each_kind_of_model(
    tiny_model: Callable[[str], Path], kind: str | None
):
    check_gate(None if kind is None else tiny_model(kind), rows=4, num_requests=8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_layout": "paged"}, r"--kv-layout paged is not one of auto, dense on mlx:cpu"),
        ({"ops": "native"}, r"--ops native: the mlx backend has one implementation"),
        ({"device": "tpu"}, r"--device 'tpu' is not one of auto, cpu"),
        (
            {"kv_cache_memory_bytes": 4096},
            r"less than one page .*; set --kv-cache-memory-bytes 524288",
        ),
        ({"max_num_seqs": 1024, "num_pages": 1 << 30}, r"needs [\d,.]+ MiB, .*leave"),
    ],
    ids=str,
)
def test_what_mlx_cannot_do_is_refused_with_the_reason(options: dict[str, Any], reason: str):
    config = EngineConfig(backend="mlx", max_model_len=128, **options)
    with pytest.raises(ConfigError, match=reason):
        plan_model(open_checkpoint(None), config)


def test_a_gguf_file_is_refused_by_name():
    checkpoint = replace(open_checkpoint(None), format="gguf")
    with pytest.raises(CheckpointError, match="not GGUF files; choose another --backend"):
        plan_model(checkpoint, CONFIG)
