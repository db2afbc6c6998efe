"""Tokens a second of `cadenza serve --backend mlx` and of `mlx_lm.server`, one after the other.

Both serve the bundled model on this machine and answer the same texts, from 1 and from 8 clients in
a closed loop. A round warms up the server, then counts. Needs the extra `mlx`.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from socket import socket

import httpx

CLIENTS = (1, 8)
REQUESTS_PER_CLIENT = 4
MAX_TOKENS = 64
START_S = 180.0
PROMPT = "Tell me a story about a fox, number {number}."


def free_port() -> int:
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """The URL of a server, which is stopped afterwards."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.HTTPError:
        return False


def complete(url: str, model: str, number: int) -> int:
    """The number of tokens of one answer."""
    body = {"model": model, "prompt": PROMPT.format(number=number), "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0.0}, timeout=600)
    return int(answer.raise_for_status().json()["usage"]["completion_tokens"])


def tokens_per_s(url: str, model: str, num_clients: int) -> float:
    counts: list[int] = []

    def client(index: int) -> None:
        for turn in range(REQUESTS_PER_CLIENT):
            counts.append(complete(url, model, index * REQUESTS_PER_CLIENT + turn))

    complete(url, model, -1)
    start = time.perf_counter()
    threads = [threading.Thread(target=client, args=(index,)) for index in range(num_clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(counts) / (time.perf_counter() - start)


def main() -> None:
    folder = str(Path(str(resources.files("cadenza"))) / "models" / "bundled")
    binaries = Path(sys.executable).parent
    for name in ("cadenza", "mlx_lm.server"):
        port = free_port()
        own = [str(binaries / name)]
        if name == "cadenza":
            own += ["serve", folder, "--backend", "mlx", "--max-num-seqs", str(max(CLIENTS))]
            own += ["--served-model-name", folder, "-c", "512"]
        else:
            own += ["--model", folder]
        with serving([*own, "--port", str(port)], port) as url:
            for num_clients in CLIENTS:
                rate = tokens_per_s(url, folder, num_clients)
                print(f"{name:15} {num_clients:3} clients: {rate:8.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
