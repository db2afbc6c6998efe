"""What prompts that are scored do to running streams, beside the same prompts computed whole.

    python benchmarks/scored_prompts.py [--shape llama-3.2-1b] [--draft draft-wide-of-1b]
        [--tokens 8192] [--prompts 4] [--streams 4] [--keep 0.3]

Starts `cadenza serve` for random weights of a shape, with `--spec-prefill` and a draft of
`benchmarks/shapes`. While so many streams run, as many long prompts arrive at once, first to be
thinned out, then whole. For both: the bound of a step that the server stated, the worst gap of any
stream and the 99th percentile of gaps until the last of these prompts has its first token, the
streams' tokens a second meanwhile, and when the first and the last of those came. Client and server
share the machine.
"""

import argparse
import asyncio
import json
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.loading.build import cache_folder
from long_prompts import TIMEOUT_S, Server
from serving import serving

SHAPES = Path(__file__).parent / "shapes"
ROOM = 512
"""Of the context, behind a long prompt."""


async def measure(server: Server, options: argparse.Namespace, *, is_thinned: bool) -> str:
    """One line of the table."""
    asked = {"spec_prefill": {"keep": options.keep, "threshold": 1024} if is_thinned else False}
    async with server.running(options.streams, options.max_tokens) as streams:
        start_s = time.perf_counter()
        async with server.bounds() as bounds:
            prompts = [server.ttft_s(options.tokens, **asked) for _ in range(options.prompts)]
            took_s = await asyncio.gather(*prompts)
        end_s = time.perf_counter()
    beside = sorted(gap for each in streams for gap in each.gaps(start_s, end_s))
    p99, worst = beside[len(beside) * 99 // 100][0], beside[-1][0]
    rate = len(beside) / (end_s - start_s)
    return (
        f"{'thinned' if is_thinned else 'whole':8}{1000 * p99:8.0f}{1000 * worst:8.0f} "
        f"{bounds.cells(beside)}{rate:9.1f}{min(took_s):9.1f}{max(took_s):8.1f}"
    )


async def measure_all(options: argparse.Namespace, url: str) -> None:
    limits = httpx.Limits(max_connections=options.streams + options.prompts + 4)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        server = Server(url, client)
        print("        -- gaps, ms --                      streams    first tokens, s")
        print("prompts      p99   worst      bound  worst/bound  tok/s    first    last")
        for _ in range(options.rounds):
            for is_thinned in (True, False):
                print(await measure(server, options, is_thinned=is_thinned), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--draft", default="draft-wide-of-1b", help="a file of benchmarks/shapes")
    parser.add_argument("--tokens", type=int, default=8192, help="of each long prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--max-tokens", type=int, default=4000, help="of each stream, at most")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()

    def folder(shape: str) -> str:
        return str(cached_checkpoint(shape, cache_folder(), lambda _: None))

    thinning = {"model": folder(str(SHAPES / f"{options.draft}.json")), "force": True}
    flags = ("--disable-log-requests", "--spec-prefill", json.dumps(thinning))
    longest = max(options.tokens, options.max_tokens)
    sizes = (longest + ROOM, options.streams + options.prompts)
    flags += ("--max-model-len", str(sizes[0]), "--max-num-seqs", str(sizes[1]))
    with ExitStack() as stack:
        url = stack.enter_context(serving(folder(options.shape), *flags))
        asyncio.run(measure_all(options, url))


if __name__ == "__main__":
    main()
