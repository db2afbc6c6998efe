"""Places to listen at: whoever cannot have one is told why, and nobody loses what is his."""

import errno
import os
import re
import socket
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from cadenza.errors import ConfigError
from cadenza.server.http.listening import Address, abandon, listening, why_not
from tests.cli.harness import run_cadenza
from tests.ports import kept_port

TIMEOUT_S = 60.0


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def left_behind(path: Path) -> None:
    """A socket whose server is no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(path))
        gone.listen()


def claim_at_once(address: Address, num_servers: int) -> list[str]:
    """All try at the same moment and hold on to what they have; what became of each."""
    barrier, done = threading.Barrier(num_servers), threading.Barrier(num_servers)
    told: list[str] = []

    def claim() -> None:
        with ExitStack() as held:
            barrier.wait(TIMEOUT_S)
            try:
                held.enter_context(listening(address))
                told.append("listens")
            except ConfigError as error:
                told.append(str(error))
            finally:
                done.wait(TIMEOUT_S)

    threads = [threading.Thread(target=claim) for _ in range(num_servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return sorted(told, key=len)


def test_of_many_that_want_a_port_one_gets_it_and_the_others_are_told() -> None:
    for _ in range(10):
        with kept_port() as port:
            first, *others = claim_at_once(Address(port=port), 4)
        assert first == "listens"
        assert len(others) == 3
        for other in others:
            assert f"--port {port}: somebody else listens there" in other


def test_of_many_that_want_a_path_one_gets_it(tmp_path: Path) -> None:
    for turn in range(10):
        path = tmp_path / str(turn)
        first, *others = claim_at_once(Address(uds=path), 4)
        assert first == "listens"
        assert all("somebody else listens there" in other for other in others)
        assert not path.exists()


def test_a_port_that_is_only_bound_is_not_had_yet() -> None:
    """Why binding is not enough."""
    with kept_port() as port, socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", port))
        first.listen()
        with pytest.raises(OSError, match=r"\[Errno"):
            second.listen()
        with pytest.raises(ConfigError, match="somebody else"), listening(Address(port=port)):
            pass


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no.such.host.invalid", "no such host"),
        ("a" * 300, "no such host"),
        ("", "no such host"),
        ("192.0.2.1", "no address of this machine"),
    ],
    ids=["unknown", "long", "empty", "another machine's"],
)
def test_a_host_that_is_not_here_is_refused(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words), listening(Address(host=host, port=0)):
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_port_that_a_user_may_not_have_is_refused_with_what_to_do(number: int) -> None:
    assert "above 1023" in why_not(OSError(number, "not you"))


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may have any port")
def test_a_privileged_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 1023"), listening(Address(port=1)):
        pass


@pytest.mark.parametrize(("asked", "mode"), [({}, 0o600), ({"uds_mode": 0o660}, 0o660)])
def test_a_path_has_its_mode_and_goes_with_its_server(
    tmp_path: Path, asked: dict[str, int], mode: int
) -> None:
    path = tmp_path / "cadenza.sock"
    with listening(Address(uds=path, **asked)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert can_connect(path)
    assert not path.exists()


def test_what_a_dead_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.sock"
    left_behind(path)
    assert not can_connect(path)
    with listening(Address(uds=path)):
        assert can_connect(path)


def test_a_server_that_is_too_busy_to_answer_keeps_its_path(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.sock"
    with ExitStack() as held:
        busy = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        busy.bind(str(path))
        busy.listen(0)
        refused = 0
        while not refused:
            client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            refused = client.connect_ex(str(path))
        assert refused == errno.EAGAIN
        with pytest.raises(ConfigError, match="somebody else"), listening(Address(uds=path)):
            pass
        assert path.exists()


def test_a_path_that_another_server_has_by_now_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.sock"
    with ExitStack() as later:
        with listening(Address(uds=path)) as ours:
            ours.close()
            later.enter_context(listening(Address(uds=path)))
        assert can_connect(path)


def test_an_abandoned_path_is_gone_and_no_other_servers_is(tmp_path: Path) -> None:
    address = Address(uds=tmp_path / "socket")
    with listening(address) as bound:
        abandon(address, bound)
        assert not can_connect(tmp_path / "socket")
        assert not (tmp_path / "socket").exists()
        with listening(address):
            abandon(address, bound)
            assert can_connect(tmp_path / "socket")


@pytest.mark.parametrize(
    ("name", "words"),
    [("file", "no socket"), ("folder", "no socket"), ("none/here", "folder"), ("x" * 200, "long")],
    ids=["a file", "a folder", "no folder", "too long"],
)
def test_a_path_that_cannot_be_had_is_refused_and_left(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=words), listening(Address(uds=tmp_path / name)):
        pass
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "folder").is_dir()


def test_the_command_says_it_in_one_line_and_exits_with_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag, value = "--port", str(taken.getsockname()[1])
        ran = run_cadenza(["serve", flag, value])
    *log, last = ran.err.splitlines()
    assert ran.code == 2, ran
    assert last.startswith("cadenza: error: --")
    assert f"{flag} {value}" in last
    # What came before is the log, each line of which begins with a time.
    assert all(re.match(r"\d{4}-\d\d-\d\dT", line) for line in log), ran.err
