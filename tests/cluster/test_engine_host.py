"""Engines on other machines: hosts on loopback, with engine processes for who has the secret."""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from cadenza.cluster.engine_host import EngineHost, HostOptions
from cadenza.cluster.remote_engine import HandshakeError, RemoteChild, greet_client, remote_opener
from cadenza.engine.process.child_process import EngineUnreachableError
from cadenza.engine.process.launch import Execute
from cadenza.errors import ConfigError
from cadenza.events import Finished
from tests.cluster.conftest import OpenGroup
from tests.engine.process.conftest import SCRIPT, TIMEOUT_S, request
from tests.engine.process.test_recovery import CONFIG, content_of, undisturbed, workload

SECRET = b"a secret of a group"
COMMAND = (sys.executable, str(SCRIPT))
OpenHost = Callable[..., EngineHost]


@pytest.fixture
def open_host(execute_scripted: Execute) -> Iterator[OpenHost]:
    with ExitStack() as stack:

        def open_one(port: int = 0) -> EngineHost:
            host = EngineHost(
                ("127.0.0.1", port), SECRET, HostOptions(command=COMMAND, execute=execute_scripted)
            )
            return stack.enter_context(closing(host))

        yield open_one


def wait_for(look: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_streams_move_from_a_lost_host_to_another_and_back_when_one_is_there_again(
    open_group: OpenGroup, open_host: OpenHost
) -> None:
    hosts = [open_host(), open_host()]
    openers = [remote_opener(each.address, SECRET) for each in hosts]
    group = open_group(2, CONFIG, [{"step_s": 0.002}], openers)
    group.wait_replicas("ready", "ready")
    for each in workload():
        group.engine.submit(each)
    group.wait(lambda: len(group.events) >= 300)
    port = hosts[0].address[1]
    hosts[0].close()
    group.wait_all()
    assert content_of(group.events) == undisturbed()
    assert group.engine.status().replicas == ("restarting", "ready")
    open_host(port)
    group.wait_replicas("ready", "ready")


def test_a_host_that_is_drained_gives_its_streams_up_before_any_of_them_ends(
    open_group: OpenGroup, open_host: OpenHost
) -> None:
    hosts = [open_host(), open_host()]
    openers = [remote_opener(each.address, SECRET) for each in hosts]
    group = open_group(2, CONFIG, [{"step_s": 0.02}], openers)
    group.wait_replicas("ready", "ready")
    for first in range(8):
        group.engine.submit(request(first, max_tokens=200))
    loads = [each.front.load for each in group.engine.replicas]
    group.wait(lambda: len(group.events) >= 16 and all(load().num_open for load in loads))
    hosts[0].close()
    group.wait(lambda: not loads[0]().num_open)
    assert loads[1]().num_open == 8
    assert not any(isinstance(each, Finished) for each in group.events)


def test_an_engine_ends_with_its_front_end_and_is_not_left_behind(open_host: OpenHost) -> None:
    host = open_host()
    child = RemoteChild(host.address, SECRET)
    wait_for(lambda: host.num_engines == 1)
    assert is_alive(child.pid)
    child.close(within_s=0.0)
    wait_for(lambda: host.num_engines == 0)
    wait_for(lambda: not is_alive(child.pid))


def test_an_engine_that_is_killed_hangs_up_on_its_front_end(open_host: OpenHost) -> None:
    child = RemoteChild(open_host().address, SECRET)
    os.kill(child.pid, signal.SIGKILL)
    with selectors.DefaultSelector() as selector:
        child.register(selector)
        while not child.frames.has_hung_up:
            assert selector.select(TIMEOUT_S)
            assert list(child.frames.receive()) == []
        child.unregister(selector)
    child.close(within_s=0.0)


def test_a_front_end_with_another_secret_gets_no_engine(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host()
    with pytest.raises(EngineUnreachableError):
        RemoteChild(host.address, b"another secret!!")
    wait_for(lambda: "another secret" in caplog.text)
    assert host.num_engines == 0


def test_a_host_with_another_secret_is_not_spoken_to() -> None:
    """It knows nothing of the secret, and answers at random."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with ours, theirs:
            ours.sendall(b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n" + b"x" * 64)
            with pytest.raises(HandshakeError, match="does not speak this protocol"):
                greet_client(theirs, SECRET)


def test_a_host_that_nobody_runs_is_told_and_tried_again(open_group: OpenGroup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    group = open_group(1, CONFIG, [{}], [remote_opener(address, SECRET)])
    group.wait(lambda: "no engine host" in (group.engine.status().error or ""))
    assert group.engine.status().state == "loading"
    with closing(EngineHost(address, SECRET, HostOptions(command=COMMAND))):
        group.engine.wait_ready(TIMEOUT_S)
        group.engine.submit(request())
        group.wait_all()
        group.stop()


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 bytes; it must have at least 16"):
        EngineHost(("127.0.0.1", 0), b"short")
