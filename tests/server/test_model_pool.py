"""Servers of several models over scripted engines: which model answers, and who waits how long."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import EngineStatus
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, CheckpointError, ConfigError, EngineClosedError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.http.listening import Address, listening
from cadenza.server.lifecycle.handover import ServerSockets
from cadenza.server.limits import ServerLimits
from cadenza.server.model_pool import RETRY_S, ModelPool, PoolOptions
from cadenza.server.served_model import ModelNames, ServedModel
from cadenza.server.service import Service
from tests.server.harness import HandClock, RunningServer, options, serving_at
from tests.server.scripted_engine import TIMEOUTS, WAIT_S, ScriptedEngine
from tests.server.test_batch_stream import next_event

COMPLETION = {"prompt": "the quick", "max_tokens": 3}


class LoadedEngine(ScriptedEngine):
    """One load of a model, which is ready when its `Loads` say so."""

    def __init__(self, loads: "Loads", script: tuple[int, ...], timeouts: RequestTimeouts) -> None:
        super().__init__(script, timeouts=timeouts)
        self._loads = loads
        self.state = "loading"

    def wait_ready(self, timeout_s: float) -> None:
        self._loads.may_load.wait(WAIT_S)
        if self.is_shut_down:
            raise EngineClosedError("it was shut down")
        error = self._loads.error
        if error is not None:
            self.state = "dead"
            raise error
        self.state = "ready"

    def shutdown(self) -> None:
        super().shutdown()
        self.state = "dead"
        self._loads.may_load.set()

    def status(self) -> EngineStatus:
        return EngineStatus(state=self.state, request_check=self._check)


@dataclass(slots=True, eq=False)
class Loads:
    """A model's engines, one for each load."""

    script: tuple[int, ...]
    timeouts: RequestTimeouts = TIMEOUTS
    error: CadenzaError | None = None
    may_load: threading.Event = field(default_factory=threading.Event)
    engines: list[LoadedEngine] = field(default_factory=list)
    limits: list[EngineLimits | None] = field(default_factory=list)

    def make(self, limits: EngineLimits | None) -> LoadedEngine:
        engine = LoadedEngine(self, self.script, self.timeouts)
        self.engines.append(engine)
        self.limits.append(limits)
        return engine


@dataclass(slots=True)
class Pool:
    """A server of the models `a`, `b` and so on, whose answers are their own names."""

    server: RunningServer
    loads: dict[str, Loads]
    clock: HandClock
    callers: ThreadPoolExecutor

    @property
    def pool(self) -> ModelPool:
        return self.server.service.models

    def complete(self, model: str | None, **changes: Any) -> httpx.Response:
        """A call to its end: a client may have read the answer before the call has left."""
        before = self.pool.num_calls
        answer = self.ask(model, **changes)
        self.until(lambda: self.pool.num_calls <= before)
        return answer

    def ask(self, model: str | None, **changes: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return self.server.post("/v1/completions", {**COMPLETION, **named, **changes})

    def later(self, model: str, **changes: Any) -> Any:
        """A call of which the test goes on before it has ended, but not before it waits."""
        before = self.pool.num_calls
        found = self.callers.submit(self.ask, model, **changes)
        self.until(lambda: self.pool.num_calls > before)
        return found

    def until(self, is_so: Callable[[], bool]) -> None:
        """Lets the server run until something is so."""
        for _ in range(20_000):
            if is_so():
                return
            self.server.call(lambda: None)
        raise AssertionError("it did not come about")

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.server.call(self.pool.advance)

    def state(self, name: str) -> str:
        return self.server.get(f"/v1/models/{name}").json()["state"]


@contextmanager
def pool_of(
    text: TextFrontend,
    names: str = "ab",
    timeouts: RequestTimeouts = TIMEOUTS,
    drain_s: float = 30.0,
    takes_any: bool = False,
    **settings: Any,
) -> Iterator[Pool]:
    clock = HandClock()
    loads = {name: Loads(text.encode(name), timeouts) for name in names}
    for each in loads.values():
        each.may_load.set()
    models = [
        ServedModel(
            ModelNames(listed=(name,), takes_any=takes_any and name == names[0]), text, each.make
        )
        for name, each in loads.items()
    ]
    chosen = options(clock=clock, limits=ServerLimits(drain_s=drain_s))
    service = Service(ModelPool(models, PoolOptions(**settings), clock), chosen)
    address = Address(port=0)
    with (
        listening(address) as bound,
        ThreadPoolExecutor(8) as callers,
        serving_at(service, address, ServerSockets(bound=bound)) as server,
    ):
        pool = Pool(server, loads, clock, callers)
        pool.until(lambda: pool.state("a") == "ready")
        yield pool


@pytest.fixture
def pool(text: TextFrontend) -> Iterator[Pool]:
    with pool_of(text) as found:
        yield found


def answer_of(response: httpx.Response) -> tuple[str, str]:
    """The model that is named in an answer, and the one whose words it has."""
    assert response.status_code == 200, response.text
    body = response.json()
    return body["model"], body["choices"][0]["text"].strip()[:1]


def test_all_models_are_listed_and_the_first_is_loaded(pool: Pool) -> None:
    cards = pool.server.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["state"]) for card in cards] == [
        ("a", "a", "ready"),
        ("b", "b", "unloaded"),
    ]
    assert pool.server.get("/ready").status_code == 200
    assert answer_of(pool.complete(None)) == ("a", "a")
    assert pool.complete("c").status_code == 404


def test_any_other_name_means_the_first_model_where_it_takes_any(text: TextFrontend) -> None:
    """Names that are served come first; answers have the model's own name."""
    with pool_of(text, takes_any=True) as pool:
        for name in ("gpt-4o", "claude-sonnet-4-5:latest", "B", "*", "x" * 200):
            assert answer_of(pool.complete(name)) == ("a", "a")
        assert answer_of(pool.complete("a:latest")) == ("a:latest", "a")
        assert pool.server.get("/v1/models/gpt-4o").json()["id"] == "a"
        assert [each["id"] for each in pool.server.get("/v1/models").json()["data"]] == ["a", "b"]
        shown = pool.server.post("/api/show", {"model": "llama3.2"})
        assert (shown.status_code, "llama3.2" in shown.text) == (200, False)
        body = {"model": "llama3.2", "prompt": "the", "stream": False, "raw": True}
        assert pool.server.post("/api/generate", body).json()["model"] == "a"
        waiting = pool.later("b")
        pool.pass_time(2.0)
        assert answer_of(waiting.result()) == ("b", "b")


def test_a_request_for_another_model_waits_for_it_and_gets_its_words(pool: Pool) -> None:
    waiting = pool.later("b")
    pool.pass_time(2.0)
    assert answer_of(waiting.result()) == ("b", "b")
    assert (pool.state("a"), pool.state("b")) == ("unloaded", "ready")
    assert pool.loads["a"].engines[0].is_shut_down
    metrics = pool.server.get("/metrics").text
    assert 'cadenza:model_loaded{model_name="b"} 1.0' in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="b"} 1.0' in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="a"} 0.0' in metrics


def test_open_requests_finish_before_their_model_is_unloaded(pool: Pool) -> None:
    engine = pool.loads["a"].engines[0]
    engine.pause()
    first = pool.later("a")
    second = pool.later("b")
    pool.pass_time(6.0)
    assert pool.state("a") == "draining"
    third = pool.later("a")
    assert not engine.is_shut_down
    engine.resume()
    assert answer_of(first.result()) == ("a", "a")
    assert answer_of(second.result()) == ("b", "b")
    pool.pass_time(2.0)
    assert answer_of(third.result()) == ("a", "a")
    assert len(pool.loads["a"].engines) == 2
    assert pool.loads["a"].limits[0] is None
    assert pool.loads["a"].limits[1] is not None, "sizes stay those of the first load"


def test_beyond_the_bound_a_request_is_told_when_to_come_again(text: TextFrontend) -> None:
    with pool_of(text, max_waiting=1) as pool:
        waiting = pool.later("b")
        refused = pool.complete("b")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert int(refused.headers["retry-after"]) > 0
        assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        assert answer_of(pool.complete("a")) == ("a", "a"), "the loaded model is not concerned"
        pool.pass_time(2.0)
        assert answer_of(waiting.result()) == ("b", "b")


def test_bodies_that_wait_are_bounded_in_bytes(text: TextFrontend) -> None:
    with pool_of(text, max_waiting_bytes=1) as pool:
        waiting = pool.later("b")
        assert pool.complete("b").status_code == 503
        pool.pass_time(2.0)
        assert answer_of(waiting.result()) == ("b", "b")


def test_the_wait_for_a_load_counts_against_the_queue_timeout(text: TextFrontend) -> None:
    with pool_of(text, timeouts=RequestTimeouts(queue_s=0.05, total_s=60.0)) as pool:
        late = pool.complete("b")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "--queue-timeout" in late.json()["error"]["message"]
        assert pool.pool.num_calls == 0


def test_a_model_that_cannot_be_loaded_refuses_its_own_requests_only(pool: Pool) -> None:
    pool.loads["b"].error = ConfigError("the weights need 9 bytes; set --quantization int8")
    waiting = pool.later("b")
    pool.pass_time(2.0)
    failed = waiting.result()
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_failed")
    assert "set --quantization int8" in failed.json()["error"]["message"]
    again = pool.complete("b")
    assert again.headers["retry-after"] == str(int(RETRY_S))
    assert answer_of(pool.complete("a")) == ("a", "a")
    pool.loads["b"].error = None
    pool.pass_time(RETRY_S)
    waiting = pool.later("b")
    pool.pass_time(2.0)
    assert answer_of(waiting.result()) == ("b", "b")


def test_why_a_checkpoint_cannot_be_loaded_is_not_told_with_its_path(pool: Pool) -> None:
    pool.loads["b"].error = CheckpointError("/srv/secret/model: no such file")
    waiting = pool.later("b")
    pool.pass_time(2.0)
    assert "secret" not in waiting.result().text


def test_an_idle_model_is_unloaded_and_the_next_request_loads_it(text: TextFrontend) -> None:
    with pool_of(text, names="a", idle_unload_s=300.0) as pool:
        assert answer_of(pool.complete("a")) == ("a", "a")
        pool.pass_time(299.0)
        assert pool.state("a") == "ready"
        pool.pass_time(1.0)
        pool.until(lambda: pool.state("a") == "unloaded")
        assert pool.loads["a"].engines[0].is_shut_down
        assert pool.server.get("/ready").status_code == 200, "the next request loads it"
        assert pool.server.post("/tokenize", {"prompt": "the"}).json()["max_model_len"] == 256
        assert 'cadenza:model_loaded{model_name="a"} 0.0' in pool.server.get("/metrics").text
        assert answer_of(pool.complete("a")) == ("a", "a")
        assert len(pool.loads["a"].engines) == 2


def test_a_model_that_is_unloaded_is_not_said_to_be_lost(text: TextFrontend) -> None:
    with pool_of(text, idle_unload_s=300.0) as pool, pool.server.client() as client:
        told = client.get("/debug/batch?model=b")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "unloaded")
        pool.pass_time(300.0)
        pool.until(lambda: pool.state("a") == "unloaded")
        assert client.get("/debug/batch?model=a").json()["error"]["code"] == "unloaded"
        with client.stream("GET", "/debug/batch/stream?model=a") as response:
            lines = response.iter_lines()
            assert [next_event(lines)[0], next_event(lines)] == [
                "hello",
                ("engine", {"state": "unloaded"}),
            ]
    with (
        pool_of(text, idle_unload_s=300.0) as pool,
        pool.server.client() as client,
        client.stream("GET", "/debug/batch/stream?model=a") as response,
    ):
        lines = response.iter_lines()
        assert next_event(lines)[0] == "hello"
        pool.pass_time(300.0)
        assert next_event(lines) == ("engine", {"state": "unloaded"})


def test_two_models_answer_side_by_side_where_two_may_be_loaded(text: TextFrontend) -> None:
    with pool_of(text, max_loaded=2) as pool:
        assert answer_of(pool.complete("b")) == ("b", "b")
        assert answer_of(pool.complete("a")) == ("a", "a")
        assert (pool.state("a"), pool.state("b")) == ("ready", "ready")
        assert [len(each.engines) for each in pool.loads.values()] == [1, 1]


def test_a_server_that_shuts_down_serves_those_that_wait_first(pool: Pool) -> None:
    waiting = pool.later("b")
    pool.server.call(pool.server.lifecycle.drain)
    assert pool.complete("a").status_code == 503
    pool.pass_time(2.0)
    assert answer_of(waiting.result()) == ("b", "b")


def test_a_server_that_stops_ends_those_that_wait(text: TextFrontend) -> None:
    with pool_of(text, drain_s=0.05) as pool:
        pool.loads["b"].may_load.clear()
        waiting = pool.later("b")
        pool.pass_time(2.0)
        pool.until(lambda: pool.state("b") == "loading")
        pool.server.call(pool.server.lifecycle.drain)
        ended = waiting.result()
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "draining")


def test_a_client_that_leaves_while_it_waits_is_forgotten(pool: Pool) -> None:
    with pool.server.client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={**COMPLETION, "model": "b"})
    pool.until(lambda: pool.pool.num_calls == 0)
    pool.pass_time(10.0)
    assert (pool.state("a"), pool.state("b")) == ("ready", "unloaded")


def test_a_response_may_go_on_from_one_of_another_model(pool: Pool) -> None:
    body = {"model": "a", "input": "the quick", "max_output_tokens": 3}
    first = pool.server.post("/v1/responses", body).json()
    pool.until(lambda: pool.pool.num_calls == 0)
    waiting = pool.callers.submit(
        pool.server.post,
        "/v1/responses",
        {**body, "model": "b", "previous_response_id": first["id"]},
    )
    pool.until(lambda: pool.pool.num_calls == 1)
    pool.pass_time(2.0)
    second = waiting.result().json()
    assert (first["model"], second["model"]) == ("a", "b")
    assert second["previous_response_id"] == first["id"]


def test_two_models_with_one_name_are_refused(text: TextFrontend) -> None:
    models = [ServedModel(ModelNames(listed=("a",)), text, Loads((1,)).make) for _ in range(2)]
    with pytest.raises(ConfigError, match="two models have the name 'a'"):
        ModelPool(models, PoolOptions(), HandClock())
