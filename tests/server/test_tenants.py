"""`--tenants`: who a tenant is, its rates with their Retry-After, and files that are refused."""

import json
import math
import random
import select
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys
from cadenza.server.errors import ApiError
from cadenza.server.metrics import ServedCounts
from cadenza.server.tenants import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    Bucket,
    TenantFile,
    TenantLimits,
    Tenants,
    read_tenants,
)
from cadenza.tenant import Tenant
from tests.server.harness import RunningServer, Serve, options, raw_post, running_server, wait_until
from tests.server.scripted_engine import ScriptedEngine

HASHED = "sha256:" + sha256(b"hashed-key").hexdigest()
WHOLE = f"""
[default]
requests_per_minute = 30

[tenants.batch]
keys = ["batch-key-1", "{HASHED}"]
weight = 0.5
page_share = 0.5
cache_share = 0.25
queue_share = 0.125

[tenants.web]
keys = ["web-key-1"]
weight = 4
tokens_per_minute = 6000
"""


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_names_tenants_their_keys_and_limits(tmp_path: Path) -> None:
    found = read_tenants(written(tmp_path, WHOLE))
    assert found == TenantFile(
        named={
            "batch": TenantLimits(
                tenant=Tenant(name="batch", weight=0.5, page_share=0.5, cache_share=0.25),
                queue_share=0.125,
            ),
            "web": TenantLimits(tenant=Tenant(name="web", weight=4.0), tokens_per_minute=6000.0),
        },
        keys={"batch-key-1": "batch", HASHED: "batch", "web-key-1": "web"},
        default=TenantLimits(requests_per_minute=30.0),
    )


def test_keys_of_the_file_are_accepted_beside_those_of_flags(tmp_path: Path) -> None:
    file = read_tenants(written(tmp_path, WHOLE))
    keys = ApiKeys(["own-key-1", "web-key-1"], file.keys)
    assert not ApiKeys((), file.keys).is_open
    for key, tenant in {
        "batch-key-1": "batch",
        "hashed-key": "batch",
        "web-key-1": "web",
        "own-key-1": sha256(b"own-key-1").hexdigest(),
        HASHED: None,
        "no-key-of-any": None,
    }.items():
        assert keys.tenant_of(f"Bearer {key}".encode()) == tenant


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[tenants.a]\nkeys = [", "is no TOML file (at end of document)"),
        (b"\xff\xfe", "is no TOML file"),
        ("a = " + "[" * 20_000, "is no TOML file"),
        ("a = " + "9" * 5_000, "is no TOML file"),
        (b"#" * (MAX_FILE_BYTES + 1), "1.0 MiB; give a smaller file"),
        ("tenants = 3", "it must be a table"),
        ("[tenants]\na = 3", "tenants.a is 3; it must be a table"),
        ("[[tenants]]\nkeys = ['key-number-1']", "it must be a table"),
        ("[tenant.a]\nkeys = ['key-number-1']", "there are default, tenants"),
        ("[tenants.a]\nkeys = ['key-number-1']\nwait = 1", "'wait'; there are cache_share"),
        ("[default]\nkeys = ['key-number-1']", "'keys'; there are cache_share"),
        ("[tenants.a]", "tenants.a has no keys"),
        ("[tenants.a]\nkeys = []", "tenants.a has no keys"),
        ("[tenants.a]\nkeys = 'key-number-1'", "tenants.a has no keys"),
        ("[tenants.a]\nkeys = ['short']", "a key of another form"),
        ("[tenants.a]\nkeys = [12345678]", "a key of another form"),
        ("[tenants.a]\nkeys = ['sha256:ABCD']", "a key of another form"),
        ("[tenants.'a b']\nkeys = ['key-number-1']", "a tenant's name is 'a b'"),
        (f"[tenants.{'a' * 33}]\nkeys = ['key-number-1']", "a tenant's name"),
        ("[default]\nweight = 0", "weight is 0; it must be a number from 0.01 to 100"),
        ("[default]\nweight = nan", "weight is nan"),
        ("[default]\nweight = true", "weight is True"),
        ("[default]\npage_share = 1.5", "page_share is 1.5"),
        ("[default]\ncache_share = -1", "cache_share is -1"),
        ("[default]\nqueue_share = '1'", "queue_share is '1'"),
        ("[default]\nrequests_per_minute = 0", "requests_per_minute is 0"),
        ("[default]\ntokens_per_minute = inf", "tokens_per_minute is inf"),
        ("[default]\ntokens_per_minute = 1979-05-27", "tokens_per_minute is"),
    ],
)
def test_a_file_of_another_form_is_refused(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants(written(tmp_path, content))
    assert words in str(caught.value)
    assert "--tenants" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_key_of_two_tenants_is_refused_without_being_told(tmp_path: Path) -> None:
    content = "[tenants.a]\nkeys = ['key-number-1']\n[tenants.b]\nkeys = ['key-number-1']"
    with pytest.raises(ConfigError, match=r"tenants\.b has a key of tenants\.a") as caught:
        read_tenants(written(tmp_path, content))
    assert "key-number-1" not in str(caught.value)


def test_too_many_keys_and_no_file_are_refused(tmp_path: Path) -> None:
    keys = [f"key-number-{at}" for at in range(MAX_KEYS + 1)]
    with pytest.raises(ConfigError, match="at most 1000"):
        read_tenants(written(tmp_path, f"[tenants.a]\nkeys = {keys}"))
    for path in (tmp_path / "nowhere", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_tenants(path)


@given(
    per_minute=st.sampled_from([0.5, 7.0, 60.0, 6000.0]),
    amounts=st.lists(st.integers(0, 9000), min_size=1, max_size=12),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_a_bucket_grants_what_it_told_to_wait_for_and_no_more_than_its_rate(
    per_minute: float, amounts: list[int], seed: int
) -> None:
    rng, bucket = random.Random(seed), Bucket(per_minute, 0.0)
    now_s, taken, largest = 0.0, 0.0, 0.0
    for amount in amounts:
        now_s += rng.uniform(0.0, 30.0)
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 1e-6:
            assert bucket.wait_s(amount, now_s + wait_s * 0.99) > 0
            assert bucket.wait_s(amount, now_s + wait_s) == pytest.approx(0, abs=1e-6)
            now_s += wait_s
        bucket.take(amount, now_s)
        taken, largest = taken + amount, max(largest, amount)
        # Only the last amount may exceed what a full bucket holds.
        assert taken <= per_minute * (1 + now_s / 60) + largest + 1e-6


class Clocked:
    """Tenants with limits by default, and the time."""

    def __init__(self, **limits: float) -> None:
        self.now_s = 0.0
        file = TenantFile(default=TenantLimits(**limits))
        self.tenants = Tenants(file, ServedCounts(), lambda: self.now_s)
        self.one, self.other = self.tenants.use("one"), self.tenants.use("other")

    def refusal(self, now_s: float, num_tokens: int = 0) -> int | None:
        """The seconds of Retry-After; None if the call is within the rates."""
        self.now_s = now_s
        try:
            self.one.check_rates(num_tokens)
        except ApiError as error:
            return int(dict(error.headers)["retry-after"])
        return None


def test_the_time_in_a_refusal_is_that_of_the_slower_bucket() -> None:
    clocked = Clocked(requests_per_minute=2.0, tokens_per_minute=600.0)
    clocked.one.take(requests=1, tokens=600)
    clocked.one.take(requests=1, tokens=0)
    assert clocked.refusal(0.0) == 30  # a request; a token comes after 0.1 s
    assert clocked.refusal(0.0, 400) == 40
    assert clocked.refusal(29.5) == 1
    assert clocked.refusal(30.0) is None
    assert clocked.refusal(40.0, 400) is None


def test_an_answer_is_paid_for_later_and_a_refused_call_uses_nothing() -> None:
    clocked = Clocked(tokens_per_minute=60.0)
    clocked.one.take(requests=1, tokens=30)
    clocked.one.take(tokens=90)
    for _ in range(5):
        assert clocked.refusal(0.0) == 61
    assert clocked.refusal(61.0) is None


def test_a_prompt_larger_than_the_bucket_waits_until_it_is_full() -> None:
    clocked = Clocked(tokens_per_minute=60.0)
    assert clocked.refusal(0.0, 1000) is None
    clocked.one.take(requests=1, tokens=1000)
    assert clocked.refusal(0.0, 1) == math.ceil(940 + 1)


def test_tenants_have_buckets_and_places_of_their_own() -> None:
    clocked = Clocked(requests_per_minute=1.0)
    clocked.one.take(requests=1, tokens=0)
    assert clocked.refusal(0.0) == 60
    clocked.other.check_rates(0)
    places = Clocked(queue_share=0.25).tenants
    with places.calling("one", 8), places.calling("one", 8):
        with pytest.raises(ApiError, match="queue_share"), places.calling("one", 8):
            pass
        with places.calling("other", 8):
            pass
    with places.calling("one", 8):
        pass


def test_one_tenant_alone_may_fill_all_places() -> None:
    tenants = Tenants(TenantFile(), ServedCounts(), lambda: 0.0)
    with ExitStack() as calls:
        for _ in range(8):
            calls.enter_context(tenants.calling("one", 8))


def test_the_last_places_are_kept_from_a_tenant_that_has_more_than_its_part() -> None:
    tenants = Clocked().tenants
    with ExitStack() as calls:
        for _ in range(14):
            calls.enter_context(tenants.calling("one", 16))
        with pytest.raises(ApiError, match="kept for others"), tenants.calling("one", 16):
            pass
        for _ in range(2):
            calls.enter_context(tenants.calling("other", 16))


def test_rates_over_http(script: tuple[int, ...], text: TextFrontend, tmp_path: Path) -> None:
    """The third request of a minute is refused, until its Retry-After; another key's is not."""
    file = read_tenants(written(tmp_path, WHOLE + "requests_per_minute = 2\n"))
    engine, now_s = ScriptedEngine(script), [100.0]
    settings = options(keys=ApiKeys((), file.keys), tenants=file, clock=lambda: now_s[0])
    body = {"prompt": "the fox", "max_tokens": 3, "ignore_eos": True}
    with running_server(engine, text, settings) as server:
        web = {"authorization": "Bearer web-key-1"}
        batch = {"authorization": "Bearer hashed-key"}
        answers = [server.post("/v1/completions", body, headers=web) for _ in range(3)]
        assert [each.status_code for each in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "30"
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert "requests_per_minute of 2 is used up" in answers[2].json()["error"]["message"]
        assert server.post("/v1/completions", body, headers=batch).status_code == 200
        now_s[0] += 30
        assert server.post("/v1/completions", body, headers=web).status_code == 200
        alone = [each.json()["choices"] for each in answers[:2]]
        assert alone[0] == alone[1]
        metrics = server.get("/metrics", headers=web).text
    assert 'admission_rejections_total{model_name="scripted",reason="rate_limited"} 1.0' in metrics
    assert [each.tenant.name for each in engine.submitted] == ["web", "web", "batch", "web"]
    assert engine.submitted[2].tenant == file.named["batch"].tenant


class Flooded:
    """A server with 16 places, an engine that stands still, and clients that do not wait."""

    def __init__(self, server: RunningServer, engine: ScriptedEngine, sockets: ExitStack) -> None:
        self.server = server
        self.engine = engine
        self._sockets = sockets

    def ask(self, key: str, prompt: list[Any], **changes: Any) -> socket.socket:
        """Returns once the call is refused, or has all the places that it gets."""
        connection = self._sockets.enter_context(self.server.connect())
        body = json.dumps({"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **changes})
        num_open = self.engine.num_open + (len(prompt) if isinstance(prompt[0], list) else 1)
        authorization = f"authorization: Bearer {key}"
        connection.sendall(raw_post("/v1/completions", body.encode(), authorization))
        wait_until(lambda: self.engine.num_open == num_open or is_answered(connection))
        return connection

    def counts(self) -> dict[str, int]:
        return {name: use.num_open for name, use in self.server.service.tenants._uses.items()}


def is_answered(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """Its status and its whole body."""
    with HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, answer.read()


@contextmanager
def flooded(
    engine: ScriptedEngine, text: TextFrontend, path: Path, content: str
) -> Generator[Flooded]:
    file = read_tenants(written(path, content))
    settings = options(keys=ApiKeys((), file.keys), tenants=file)
    with running_server(engine, text, settings) as server, ExitStack() as sockets:
        engine.pause()
        yield Flooded(server, engine, sockets)


def test_without_keys_only_the_queue_itself_is_full(serve: Serve) -> None:
    """Calls whose bodies are still read take no share of the queue; a refusal names its flag."""
    body = json.dumps({"prompt": [6], "max_tokens": 2, "ignore_eos": True}).encode()
    server = serve(max_num_queued_reqs=12)
    engine = server.engine
    with ExitStack() as sockets:
        engine.pause()
        crowd = Flooded(server, engine, sockets)
        slow = [sockets.enter_context(server.connect()) for _ in range(16)]
        for connection in slow:
            connection.sendall(raw_post("/v1/completions", body)[:-1])
        wait_until(lambda: crowd.counts() == {"": 16})
        calls = [crowd.ask("", [6]) for _ in range(16)]
        assert not any(map(is_answered, calls)), answer_of(calls[-1])
        for connection in slow:
            connection.sendall(body[-1:])
            status, answer = answer_of(connection)
            assert status == 429
            assert b"--max-num-queued-reqs" in answer
            assert b"share" not in answer
        engine.resume()
        assert [answer_of(call)[0] for call in calls] == [200] * 16


TWO = "[tenants.one]\nkeys = ['key-of-one']\n{}\n[tenants.other]\nkeys = ['key-of-other']"
MANY: list[Any] = [[5]] * 8
"""Of one call: as many as enter together, half of the places."""


@pytest.mark.parametrize("end", ["finish", "fail", "leave", "cancel"])
def test_the_last_places_are_kept_from_a_call_with_many_prompts(
    script: tuple[int, ...], text: TextFrontend, tmp_path: Path, end: str
) -> None:
    """Each prompt has a place, and no count is left, however the calls end."""
    engine = ScriptedEngine(script, max_num_queued_reqs=12)
    with flooded(engine, text, tmp_path, TWO.format("")) as flood:
        calls = [flood.ask("key-of-other", [6])]
        calls.append(flood.ask("key-of-one", MANY[:7], request_id="many-1"))
        calls += [flood.ask("key-of-one", [6]) for _ in range(6)]
        refused = flood.ask("key-of-one", [6])
        assert is_answered(refused), "a kept place was taken"
        status, answer = answer_of(refused)
        assert (status, b"13 of your requests are open" in answer) == (429, True)
        calls += [flood.ask("key-of-other", [6]) for _ in range(2)]
        assert engine.num_open == 16
        assert flood.counts() == {"one": 13, "other": 3}
        if end == "cancel":
            key = {"authorization": "Bearer key-of-one"}
            cancelled = flood.server.post("/v1/requests/many-1/cancel", headers=key)
            assert cancelled.status_code == 200
            wait_until(lambda: flood.counts() == {"one": 6, "other": 3})
            calls.append(flood.ask("key-of-one", [6]))
            assert flood.counts() == {"one": 7, "other": 3}
        elif end == "leave":
            for call in calls:
                call.close()
        engine.failing = "step_failed" if end == "fail" else None
        if end != "leave":
            engine.resume()
            wait_until(lambda: all(map(is_answered, calls)))
        wait_until(lambda: flood.counts() == {"one": 0, "other": 0})
        assert not engine.num_open


def test_a_queue_share_counts_each_prompt(
    script: tuple[int, ...], text: TextFrontend, tmp_path: Path
) -> None:
    engine = ScriptedEngine(script, max_num_queued_reqs=12)
    with flooded(engine, text, tmp_path, TWO.format("queue_share = 0.5")) as flood:
        flood.ask("key-of-one", MANY)
        refused = flood.ask("key-of-one", [6])
        assert is_answered(refused), "a ninth place was taken"
        assert b"8 of your requests are open" in answer_of(refused)[1]
        flood.ask("key-of-other", [6])
        assert flood.counts() == {"one": 8, "other": 1}
        engine.resume()
        wait_until(lambda: flood.counts() == {"one": 0, "other": 0})


def test_prompts_that_have_ended_are_counted_no_more(
    script: tuple[int, ...], text: TextFrontend, tmp_path: Path
) -> None:
    """Of 40 prompts 8 are open at a time, and none when the answer is there."""
    engine = ScriptedEngine(script, max_num_queued_reqs=12)
    with flooded(engine, text, tmp_path, TWO.format("")) as flood:
        engine.resume()
        key = {"authorization": "Bearer key-of-one"}
        body = {"prompt": MANY * 5, "max_tokens": 2, "ignore_eos": True}
        for _ in range(2):
            answer = flood.server.post("/v1/completions", body, headers=key)
            assert len(answer.json()["choices"]) == 40
            wait_until(lambda: flood.counts() == {"one": 0})


def test_a_call_that_is_refused_leaves_no_count(
    script: tuple[int, ...], text: TextFrontend, tmp_path: Path
) -> None:
    """By its body, its model, its length, the queue's tokens, or a rate."""
    engine = ScriptedEngine(script, max_num_queued_reqs=2, max_num_queued_tokens=4)
    content = TWO.format("tokens_per_minute = 1")
    with flooded(engine, text, tmp_path, content) as flood:
        flood.ask("key-of-other", [6] * 2)
        for prompt, changes, status in [
            ([6], {"max_tokns": 1}, 400),
            ([6], {"model": "no-such"}, 404),
            ([[6], [6] * 300], {}, 400),
            ([[6] * 3, [6]], {}, 429),
        ]:
            assert answer_of(flood.ask("key-of-one", prompt, **changes))[0] == status
            wait_until(lambda: flood.counts() == {"one": 0, "other": 1})
        flood.ask("key-of-one", [6] * 2)
        answer = answer_of(flood.ask("key-of-one", [6]))[1]
        assert b"tokens_per_minute of 1 is used up" in answer
        wait_until(lambda: flood.counts() == {"one": 1, "other": 1})
        engine.resume()
        wait_until(lambda: flood.counts() == {"one": 0, "other": 0})


def test_keys_outside_the_file_share_by_default_limits() -> None:
    default = TenantLimits(tenant=Tenant(weight=3.0))
    tenants = Tenants(TenantFile(default=default), ServedCounts(), lambda: 0.0)
    assert tenants.use("digest").tenant == replace(default.tenant, name="digest")
