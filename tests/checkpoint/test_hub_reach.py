"""A network that drops what is sent: found within the limit, whatever drops it."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.hub import CONNECT_S, Hub, connect_limit_s, is_silent
from cadenza.errors import CheckpointError
from tests.checkpoint.hub_server import NAME
from tests.ports import refusing_port, silent_port

SHORT_S = 0.2
ENDPOINT = "http://hub.example:8080"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def silent() -> Iterator[int]:
    with silent_port() as port:
        yield port


def known_as(*ports: int) -> Any:
    """Names have these addresses; the port that is asked for is none of theirs."""

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        assert (host, port) == ("hub.example", 8080)
        kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        return [(*kind, ("127.0.0.1", each)) for each in ports]

    return resolve


def test_a_silent_hub_is_told_before_its_client_waits(silent: int, tmp_path: Path):
    hub = Hub(endpoint=f"http://127.0.0.1:{silent}", cache=tmp_path, is_offline=False)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as refused:
        hub.fetch(NAME)
    assert time.monotonic() - start < 2.0
    assert f"does not answer within {CONNECT_S:g} s for the hub model {NAME}" in str(refused.value)
    assert "HF_HUB_OFFLINE=1" in str(refused.value)


def test_one_address_that_answers_is_enough(silent: int):
    with socket.create_server(("127.0.0.1", 0)) as server, refusing_port() as refusing:
        sound = server.getsockname()[1]
        for ports, is_so in (
            ((silent, sound), False),
            ((sound,), False),
            ((refusing,), False),
            ((refusing, silent), True),
            ((silent, silent), True),
            ((), False),
        ):
            assert is_silent(ENDPOINT, SHORT_S, known_as(*ports)) is is_so, ports


def test_names_that_nobody_answers_count_too():
    held = threading.Event()

    def resolve(*_: object, **__: object) -> list[Any]:
        held.wait(30)
        return []

    try:
        assert is_silent(ENDPOINT, SHORT_S, resolve)
    finally:
        held.set()


def test_a_name_that_is_not_known_is_left_to_the_client():
    def resolve(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    assert not is_silent(ENDPOINT, SHORT_S, resolve)


def test_a_proxy_is_asked_in_the_hubs_place(silent: int, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not is_silent(ENDPOINT, SHORT_S)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{silent}")
    assert is_silent(ENDPOINT, SHORT_S)
    monkeypatch.setenv("no_proxy", "hub.example")
    assert not is_silent(ENDPOINT, SHORT_S, known_as())


def test_the_hubs_own_variable_sets_the_limit(monkeypatch: pytest.MonkeyPatch):
    assert connect_limit_s() == CONNECT_S
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "7")
    assert connect_limit_s() == 7.0
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "x")
    assert connect_limit_s() == CONNECT_S
