"""Commands that ask a server: they trust --cacert, ask loopback without a proxy, name a cause."""

from pathlib import Path

import pytest

from tests.cli.harness import ENGINE, Cadenza
from tests.echo_server import CERTIFICATE, echoing
from tests.ports import refusing_port

COMMANDS: dict[str, tuple[str, ...]] = {
    "top": ("top", "{url}"),
    "verify": ("verify", "--url", "{url}"),
    "bench serve": ("bench", "serve", "{url}"),
    "bench compare": ("bench", "compare", "--url", "a={url}", "--url", "b={url}"),
    "replay": ("replay", "{receipts}", "--url", "{url}"),
}


@pytest.fixture(scope="module")
def receipts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cadenza.cli import main

    file = tmp_path_factory.mktemp("receipts") / "r.jsonl"
    words = ("generate", "--model", model, "the quick", "--receipt", file, "--max-tokens", 2)
    assert main([str(each) for each in (*words, *ENGINE)]) == 0
    return file


def words_of(command: str, url: str, receipts: Path) -> list[str]:
    return [each.format(url=url, receipts=receipts) for each in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_certificate_that_signs_itself_is_named_and_trusted_by_cacert(
    cadenza: Cadenza, receipts: Path, command: str
):
    with echoing(is_secure=True) as server:
        words = words_of(command, f"https://localhost:{server.port}", receipts)
        refused = cadenza(*words)
        assert refused.code in (1, 2)
        assert "its certificate is of no authority that is known here" in refused.err
        assert "self-signed certificate" in refused.err
        assert "--cacert FILE" in refused.err
        assert not server.paths
        cadenza(*words, "--cacert", CERTIFICATE)
        assert server.paths
    absent = cadenza(*words, "--cacert", "absent.pem")
    assert (absent.code, "--cacert absent.pem cannot be read" in absent.err) == (2, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_of_this_machine_is_asked_without_the_proxy_of_the_environment(
    cadenza: Cadenza, receipts: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    with refusing_port() as port, echoing() as server:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        cadenza(*words_of(command, f"http://localhost:{server.port}", receipts))
        assert server.paths


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_without_a_server_is_said_to_refuse(cadenza: Cadenza, receipts: Path, command: str):
    with refusing_port() as port:
        ran = cadenza(*words_of(command, f"http://127.0.0.1:{port}", receipts))
    assert ran.code in (1, 2)
    assert "the connection is refused; is the server there?" in ran.err


def test_a_certificate_without_a_server_is_refused(cadenza: Cadenza, receipts: Path):
    for words in (("verify",), ("replay", receipts)):
        ran = cadenza(*words, "--cacert", CERTIFICATE)
        assert (ran.code, "--cacert changes nothing without --url" in ran.err) == (2, True)
