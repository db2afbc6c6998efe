"""The overhead of HTTP serving: tokens per second of `cadenza serve` as a share of those of `LLM`.

    python benchmarks/serving_overhead.py [--shape smollm2-135m] [--num-requests 192]

Uses random weights of the given shape, kept in the cache folder. Both sides run the requests of
`cadenza bench serve` with one row per concurrent client; the client runs on the same machine. The
two alternate, so that changes of the machine's speed affect both; each share compares two
consecutive runs.
"""

import argparse
import statistics
import time
from pathlib import Path

from cadenza import LLM, SamplingParams
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_figures import LoadFigures
from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.loading.build import cache_folder
from serving import serving

MAX_MODEL_LEN = 1024


def served(folder: Path, concurrency: int, num_requests: int, seed: int) -> LoadFigures:
    flags = ("--disable-log-requests", "--max-num-seqs", str(concurrency))
    with serving(folder, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as url:
        options = LoadOptions(concurrency=(concurrency,), num_requests=num_requests, seed=seed)
        found = measure_serving(ServerAddress(url=url), options, lambda *_: None)
        assert found.num_failures == 0
        return found.loads[0]


def offline_tok_s(folder: Path, concurrency: int, num_requests: int, seed: int) -> float:
    planned = LoadOptions(seed=seed).source().take(num_requests, 1)
    params = [
        SamplingParams(max_tokens=each.max_tokens, temperature=0.0, ignore_eos=True)
        for each in planned
    ]
    prompts = [list(each.prompt_token_ids) for each in planned]
    with LLM(folder, max_num_seqs=concurrency, max_model_len=MAX_MODEL_LEN) as llm:
        llm.generate(prompts[0], params[0])
        start_s = time.perf_counter()
        llm.generate(prompts, params)
        return sum(each.max_tokens for each in planned) / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    folder = cached_checkpoint(arguments.shape, cache_folder())
    load_of = (folder, arguments.concurrency, arguments.num_requests)
    shares: list[float] = []
    for repeat in range(arguments.repeats):
        load = served(*load_of, repeat)
        alone = offline_tok_s(*load_of, repeat)
        shares.append(load.output_tok_s / alone)
        print(
            f"served {load.output_tok_s:6.0f} tok/s, LLM {alone:6.0f} tok/s: {shares[-1]:.0%}; "
            f"us a token: client {load.client_us_per_token:.0f}, "
            f"server {load.server_us_per_token:.0f}",
            flush=True,
        )
    print(f"median: serving costs {1 - statistics.median(shares):.0%}")


if __name__ == "__main__":
    main()
