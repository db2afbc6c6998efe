"""What a tenant's flood does to another tenant's time to the first token, on a real server.

    python benchmarks/flood.py [--shape smollm2-135m] [--request-rate 0.4] [--num-requests 50]

Starts `cadenza serve` with two API keys, for random weights of a shape or for the bundled model.
The polite tenant sends its requests at a rate: alone, and beside one that sends 20 times as many;
so `--rounds` times. Prints the p50 and p99 of the polite tenant's time to the first token, what was
refused, and the medians of the ratios. Both clients run on the server's machine.
"""

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from serving import COMMAND, serving

from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_figures import LoadFigures, Spread
from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.loading.build import cache_folder

KEYS = POLITE_KEY, FLOOD_KEY = "polite-tenant", "flooding-tenant"
TIMES = 20
FILL_S = 15.0
MAX_MODEL_LEN = 2048


@contextmanager
def serving_both(folder: Path | None) -> Generator[str]:
    """Starts a server for both tenants and yields its URL."""
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("\n".join(KEYS))
        keys.flush()
        flags = ["--disable-log-requests", "--api-key-file", keys.name]
        with serving(folder, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as url:
            yield url


@contextmanager
def flooding(url: str, request_rate: float, seed: int) -> Generator[None]:
    """Sends requests of the flooding tenant until the block ends; the first ones fill the rows."""
    options = ["--request-rate", str(request_rate), "--num-requests", "100000"]
    options += ["--api-key", FLOOD_KEY, "--seed", str(seed)]
    client = subprocess.Popen(
        [*COMMAND, "bench", "serve", url, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client.wait(timeout=FILL_S)
        raise SystemExit("the flood ended; run `cadenza bench serve` by hand")
    except subprocess.TimeoutExpired:
        yield
    finally:
        client.kill()
        client.wait()


def polite(url: str, request_rate: float, num_requests: int, seed: int) -> LoadFigures:
    address = ServerAddress(url=url, api_key=POLITE_KEY)
    options = LoadOptions(request_rate=(request_rate,), num_requests=num_requests, seed=seed)
    return measure_serving(address, options, lambda _: None).loads[0]


def show(name: str, figures: LoadFigures) -> Spread:
    ttft = figures.ttft
    assert ttft is not None, f"no request was answered: {figures.errors}"
    print(
        f"{name:6} {figures.num_answers:4} answers, p50 {ttft.p50_s * 1e3:6.0f} ms, "
        f"p99 {ttft.p99_s * 1e3:6.0f} ms, not answered: {figures.errors or 'none'}",
        flush=True,
    )
    return ttft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default=None)
    parser.add_argument("--request-rate", type=float, default=0.4)
    parser.add_argument("--num-requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    folder = None
    if arguments.shape is not None:
        folder = cached_checkpoint(arguments.shape, cache_folder(), lambda _: None)
    rate, count = arguments.request_rate, arguments.num_requests
    ratios: list[tuple[float, float]] = []
    for seed in range(arguments.rounds):
        with serving_both(folder) as url:
            alone = show("alone", polite(url, rate, count, seed))
            with flooding(url, TIMES * rate, seed + 1000):
                beside = show("flood", polite(url, rate, count, seed))
        ratios.append((beside.p50_s / alone.p50_s, beside.p99_s / alone.p99_s))
    p50, p99 = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"beside the flood, times as long as alone: p50 {p50:.2f}, p99 {p99:.2f}")


if __name__ == "__main__":
    main()
