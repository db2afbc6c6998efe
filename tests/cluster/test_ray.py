"""Streams through Ray Serve outlive the engines that they run in."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("ray_child.py")

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'"
)


@needs_ray
@pytest.mark.soak
@pytest.mark.parametrize(("num_streams", "num_kills"), [(16, 4), (64, 50)])
def test_no_client_sees_that_engines_are_killed(num_streams: int, num_kills: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, str(CHILD), *map(str, (num_streams, num_kills, port))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["failed"] == found["differing"] == 0, found
    assert found["played"] >= num_streams
    assert found["resumed"] > 0
