"""What one viewer of the batch costs: tokens a second with and without /debug/batch/stream.

    python benchmarks/viewer_cost.py [--shape smollm2-135m] [--rounds 4]

One server, whose rows are always full: as many clients of `cadenza bench serve` as rows. Each round
has a run without and a run with a viewer, in turn first (A B, B A, …), so that a machine that gets
faster or slower favours neither. The viewer reads as `cadenza top` and the page do, but in this
process, with the clients: its share of the processor counts as a cost here, too.
"""

import argparse
import json
import statistics
import threading
from collections.abc import Generator
from contextlib import contextmanager

import httpx

from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.loading.build import cache_folder
from serving import serving

PATH = "/debug/batch/stream"
MAX_MODEL_LEN = 1024


@contextmanager
def viewing(url: str, num_events: list[int]) -> Generator[None]:
    """Reads the stream until the block ends."""
    is_over = threading.Event()

    def read() -> None:
        with httpx.stream("GET", url + PATH, timeout=60.0) as response:
            for line in response.iter_lines():
                num_events[0] += line.startswith("event: step")
                if is_over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tok_s(url: str, concurrency: int, num_requests: int, seed: int) -> float:
    options = LoadOptions(concurrency=(concurrency,), num_requests=num_requests, seed=seed)
    found = measure_serving(ServerAddress(url=url), options, lambda *_: None)
    assert found.num_failures == 0
    return found.loads[0].output_tok_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    folder = cached_checkpoint(arguments.shape, cache_folder())
    flags = ("--disable-log-requests", "--max-num-seqs", str(arguments.concurrency))
    rates: dict[str, list[float]] = {"without": [], "with": []}
    num_events = [0]
    with serving(folder, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as url:
        tok_s(url, arguments.concurrency, arguments.concurrency, seed=0)  # warm-up
        for place in range(arguments.rounds):
            for name in ("without", "with") if place % 2 == 0 else ("with", "without"):
                asked = (url, arguments.concurrency, arguments.num_requests, 1 + place)
                if name == "without":
                    rates[name].append(tok_s(*asked))
                else:
                    with viewing(url, num_events):
                        rates[name].append(tok_s(*asked))
                print(f"{name:8} {rates[name][-1]:8.1f} tok/s", flush=True)
    pairs = zip(rates["with"], rates["without"], strict=True)
    costs = [100.0 * (1.0 - seen / unseen) for seen, unseen in pairs]
    spread = [100.0 * (max(each) / min(each) - 1.0) for each in rates.values()]
    print(f"{num_events[0]} events; cost {statistics.median(costs):.2f} % (median of {len(costs)})")
    print(f"spread of the runs without {spread[0]:.1f} %, with {spread[1]:.1f} %")
    print(json.dumps({"tok_s": rates, "cost_percent": costs}))


if __name__ == "__main__":
    main()
