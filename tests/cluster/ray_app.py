"""`RayApp`: the application on a Ray cluster of this machine, and streams through its ingress."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

CHILD = Path(__file__).with_name("ray_child.py")
WITHIN_S = 300.0
MAX_TOKENS = 160


class RayApp:
    """Starts it in a process of its own, with `environ` beside this one's; `close` ends it."""

    def __init__(self, environ: Mapping[str, str] | None = None, **flags: Any) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        told = json.dumps({"port": self.port, "flags": {"disable_log_requests": True, **flags}})
        self._child = subprocess.Popen(
            [sys.executable, str(CHILD), told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            env={**os.environ, **(environ or {})},
            text=True,
        )
        self._answer("ready")

    def obey(self, command: str) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.read()
        self._child.wait(WITHIN_S)
        self._child.stdout.close()

    def wait_ready(self, count: int) -> None:
        """Until so many engines serve a front end."""
        end_s = time.monotonic() + WITHIN_S
        while self.num_ready() < count:
            assert time.monotonic() < end_s, f"{count} engines are not ready"
            time.sleep(0.2)

    def num_ready(self) -> int:
        """Engines; one alone is not counted by state."""
        try:
            ready = httpx.get(f"{self.url}/ready", timeout=WITHIN_S, trust_env=False)
            text = httpx.get(f"{self.url}/metrics", timeout=WITHIN_S, trust_env=False).text
        except httpx.HTTPError:
            return 0
        is_ready = ready.status_code == httpx.codes.OK
        return max(int(is_ready), int(metric(text, "cadenza:replicas{", 'state="ready"')))

    def metric(self, name: str) -> float:
        return metric(httpx.get(f"{self.url}/metrics", trust_env=False).text, name, "")

    def _answer(self, wanted: str | None = None) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if wanted is None or line.strip() == wanted:
                return line.strip()
        raise AssertionError(f"Ray ended with exit status {self._child.wait(WITHIN_S)}")


def metric(text: str, name: str, label: str) -> float:
    """The sum of the samples that begin so and have this label."""
    lines = [each for each in text.splitlines() if each.startswith(name) and label in each]
    return sum(float(each.rsplit(" ", 1)[1]) for each in lines)


async def stream(client: httpx.AsyncClient, index: int, max_tokens: int = MAX_TOKENS) -> str:
    """A streamed answer, or the error that its client sees. Every third draws nothing."""
    body = {
        "prompt": f"Story {index}: once upon a time",
        "max_tokens": max_tokens,
        "temperature": 0.0 if index % 3 == 0 else 0.8,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    text, is_whole = "", False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"error: {answer.status_code} {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        return f"error: {line}"
                    text += event["choices"][0]["text"]
    except httpx.HTTPError as error:
        return f"error: {error!r}"
    return text if is_whole else f"error: it ended after {text!r}"
