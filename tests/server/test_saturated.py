"""Probes while every row is busy and texts of 4 MiB are tokenised one after the other."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.server.crowd import ask, bystander, closing_get, share
from tests.server.serve_process import ServeProcess, serve_process
from tests.server.test_crowds import gauge, port_of, show
from tests.server.test_probes import FLAGS, PATHS

NUM_ROWS = 4
BESIDE = "/beside"
CROWD = """
import sys
from tests.server.crowd import saturate
from tests.server.test_probes import LONG_CALLS
saturate(int(sys.argv[1]), int(sys.argv[2]), [call[:2] for call in LONG_CALLS.values()])
"""


@contextmanager
def saturated(serving: ServeProcess) -> Generator[None]:
    """By a process of its own, so that the probes' times are the server's."""
    command = [sys.executable, "-c", CROWD, str(port_of(serving)), str(2 * NUM_ROWS)]
    crowd = subprocess.Popen(command)
    try:
        serving.wait_for(
            lambda: gauge(serving, 'cadenza:num_requests_running{model_name="bundled"}') == NUM_ROWS
        )
        yield
        assert crowd.poll() is None, "the crowd has failed"
    finally:
        crowd.kill()
        crowd.wait()


def play(seconds: float) -> dict[str, list[float]]:
    """Seconds that each answer took, by path; those of a server with nothing to do as well."""
    with serve_process(*FLAGS) as serving, bystander() as other_port:
        serving.wait_ready()
        ports = {**dict.fromkeys(PATHS, port_of(serving)), BESIDE: other_port}
        with saturated(serving):
            times = asyncio.run(ask_in_turn(ports, seconds))
    for path, found in times.items():
        p50, p99, worst = (share(found, q) * 1e3 for q in (0.5, 0.99, 1.0))
        show(f"{path}: {len(found)} probes, p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f} ms")
    return times


async def ask_in_turn(ports: dict[str, int], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {path: [] for path in ports}
    end_s = time.monotonic() + seconds
    while True:
        for path, port in ports.items():
            reply = await ask(port, closing_get(path))
            assert reply.status == 200
            times[path].append(reply.seconds)
        if time.monotonic() >= end_s:
            return times


@pytest.mark.soak
def test_probes_are_answered_at_once_by_a_saturated_server() -> None:
    """Where others use the machine, by what they cost a server with nothing to do."""
    p99_s = {path: share(found, 0.99) for path, found in play(60.0).items()}
    allowed_s = 0.05 + p99_s.pop(BESIDE)
    assert max(p99_s.values()) < allowed_s
